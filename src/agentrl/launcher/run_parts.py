"""Which files and folders of a run's folder the run itself wrote.

A folder given with `--output_dir` may hold other files, also under names like ours. A file of a run
is known by its name, and a folder also by its content.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOGS = Path("logs/as")


def _holds(*patterns: str) -> Callable[[Path], bool]:
    return lambda folder: any(any(folder.glob(pattern)) for pattern in patterns)


@dataclass(frozen=True)
class _Kind:
    """Parts by name. `inside`: the folder's own entries, where others' may be among them.
    `ours`: whether a folder is a run's."""

    name: re.Pattern[str]
    ours: Callable[[Path], bool] = Path.is_dir
    inside: re.Pattern[str] | None = None


_FILES = re.compile(
    r"(launch|run|summary)\.json|launch(-\d+)?\.lock|metrics\.jsonl|(curve|training)\.png"
    r"|\.(launch|run|summary|metrics|curve|training)(\.\d+)?\.partial\.\w+|\.seen-by-all-\w+"
)
_TASK_NOTES = re.compile(r"files\.json|\w{16}(\.npz|\.arrow|-\w+\.checked)|\..*\.partial\.\w+")
_FOLDERS = (
    _Kind(re.compile("mongo"), _holds("WiredTiger*", "storage.bson", "mongod.lock", "port")),
    _Kind(re.compile(r"checkpoint-\d+"), _holds("*.distcp")),
    _Kind(re.compile(r"checkpoint-\d+(\.\w+)*\.(partial|removed)")),
    _Kind(re.compile("weights"), inside=re.compile(r"v\d+(\.partial)?|probe-\w+")),
    _Kind(
        re.compile("eval"),
        inside=re.compile(r"\.?(checkpoint-\d+|model-|comparison).*\.json|\.export-.*"),
    ),
    _Kind(re.compile(r"start-model-\w+"), _holds("config.json")),
    _Kind(re.compile("tasks"), inside=_TASK_NOTES),
    _Kind(re.compile("tensorboard"), _holds("**/events.out.tfevents.*")),
)


def parts_of(folder: Path) -> list[Path]:
    """The entries of a run's folder that the run wrote, sorted. Links are not followed."""
    if not folder.is_dir():
        return []
    found: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() or not entry.is_dir():
            known = [kind for kind in _FOLDERS if kind.name.fullmatch(entry.name)]
            if _FILES.fullmatch(entry.name) or (entry.is_symlink() and known):
                found.append(entry)
            continue
        for kind in _FOLDERS:
            if kind.name.fullmatch(entry.name) and kind.ours(entry):
                found += _own_entries(entry, kind.inside)
    return found


def _own_entries(folder: Path, inside: re.Pattern[str] | None) -> list[Path]:
    """The folder, or those of its entries that are the run's if there are others."""
    if inside is None:
        return [folder]
    entries = sorted(folder.iterdir())
    own = [entry for entry in entries if inside.fullmatch(entry.name)]
    return [folder] if own == entries else own


def logs_of(run: str, logs: Path = LOGS) -> list[Path]:
    """The run's log files. A run `a` has none of those of a run `a_train`."""
    parts = r"(train_\d+|serve(-\d+)?|sample-\d+|tools|mongo)"
    name = re.compile(rf"{re.escape(run)}_{parts}\.log")
    return sorted(file for file in logs.glob(f"{run}_*.log") if name.fullmatch(file.name))


def disk_bytes(path: Path) -> int:
    """Disk usage in bytes of a file or of a folder with its content. Links are not followed."""
    try:
        taken = os.lstat(path).st_blocks * 512
        if path.is_dir() and not path.is_symlink():
            taken += sum(disk_bytes(entry) for entry in path.iterdir())
    except FileNotFoundError:  # a live run takes files away, too
        return 0
    return taken


def shown_bytes(n: int) -> str:
    """Format a size for display."""
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB" if n >= 1e6 else f"{n} B"
