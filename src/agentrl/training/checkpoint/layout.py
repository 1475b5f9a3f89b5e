"""What a checkpoint is: a folder, the step that it holds, and whose run it belongs to.

A checkpoint is the folder `checkpoint-STEP` of a run's output. It holds the learner's state and
each process's random state as torch's distributed checkpoint (DCP), and `trainer_state.json` with
the position in the data ledger. A folder with its final name is always whole: it is written under
another name, synced to disk and renamed last. Not in here: writing and reading what is in it
(`save`).
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.configs import Config
from agentrl.configs.flags import FLAGS
from agentrl.databases.documents import TrainerStart
from agentrl.databases.runs import in_lineage
from agentrl.redaction import without_passwords

STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_PARTIAL, _REMOVED = ".partial", ".removed"  # what follows the name of a folder that is not whole


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message is one sentence for the user."""


@dataclass(frozen=True)
class TrainerState:
    """The position of a run. Its rows are those that the ledger says were trained up to `step`."""

    step: int  # optimizer steps done
    version: int  # policy version that these weights were or will be published as
    run_name: str
    config: Mapping[str, Any]  # the flags, by group, for people to read
    fence: int  # number of the trainer that saved it
    processes: int  # that saved it, each with its random state


def recorded_config(config: Config) -> dict[str, dict[str, Any]]:
    """The flags by group, without secrets: what checkpoints and trackers keep of them."""
    return {
        group: {
            name: None if FLAGS[name].info.secret else _shown(value)
            for name, value in flags.items()
        }
        for group, flags in asdict(config).items()
    }


def _shown(value: object) -> object:
    return without_passwords(value) if isinstance(value, str) else value


def checkpoint_path(output: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return output / f"checkpoint-{step}"


def partial_path(output: Path, state: TrainerState) -> Path:
    """Where the checkpoint of `state` is written until it is whole.

    Each trainer has its own: one that was replaced and wakes writes to no folder of its successor.
    """
    return output / f"{checkpoint_path(output, state.step).name}.{state.fence}{_PARTIAL}"


def list_checkpoints(output: Path) -> list[Path]:
    """The run's checkpoints, oldest first. Incomplete folders are none."""
    found = []
    for folder in output.glob("checkpoint-*"):
        match = _NAME.fullmatch(folder.name)
        if match and (folder / STATE_FILE).is_file():
            found.append((int(match[1]), folder))
    return [folder for _, folder in sorted(found)]


def read_state(checkpoint: Path) -> TrainerState:
    """What `trainer_state.json` says. Raises `CheckpointError` if the folder is no checkpoint."""
    if (checkpoint / "config.json").is_file():  # also of transformers.Trainer, with the same name
        raise CheckpointError(
            f"{checkpoint} is no checkpoint of a run but a model folder: it can be given as it is "
            "with --model_name_or_path (MODEL)"
        )
    try:
        return TrainerState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} is no complete checkpoint ({STATE_FILE}: {error})"
        ) from None


def begin_checkpoint(output: Path, state: TrainerState) -> Path:
    """Make the empty folder that the checkpoint of `state` is written to. For rank 0."""
    partial = partial_path(output, state)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish_checkpoint(output: Path, state: TrainerState, save_total_limit: int | None) -> None:
    """Give the folder, whose files are whole and synced, its final name. For rank 0.

    Then the oldest checkpoints beyond `save_total_limit` are removed.
    """
    partial, final = partial_path(output, state), checkpoint_path(output, state.step)
    with (partial / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump(asdict(state), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync_entries(partial)
    if final.exists():  # of a trainer that was replaced and still saved
        _supersede(final)
    os.rename(partial, final)
    _sync_entries(output)
    for old in list_checkpoints(output)[: -save_total_limit if save_total_limit else 0]:
        _remove(old)


def clear_unfinished(output: Path) -> None:
    """Remove the remains of interrupted saves and removals. For rank 0, at the start."""
    for pattern in (f"checkpoint-*{_PARTIAL}", f"checkpoint-*{_REMOVED}"):
        for folder in output.glob(pattern):
            shutil.rmtree(folder)


def lineage_checkpoints(output: Path, starts: Sequence[TrainerStart]) -> list[Path]:
    """The checkpoints that the run, with trainers that began at `starts`, may go on from."""
    return [folder for folder in list_checkpoints(output) if _in_lineage(folder, starts)]


def supersede_others(output: Path, step: int, starts: Sequence[TrainerStart]) -> None:
    """Rename checkpoints that are no part of a run that goes on from `step`. For rank 0.

    They are those of later steps, whose rows are trained anew, and those that a trainer which had
    been replaced still saved. For people's eyes: `lineage_checkpoints` leaves both out by itself.
    """
    for folder in list_checkpoints(output):
        if read_state(folder).step > step or not _in_lineage(folder, starts):
            _supersede(folder)
    _sync_entries(output)


def _in_lineage(checkpoint: Path, starts: Sequence[TrainerStart]) -> bool:
    state = read_state(checkpoint)
    return in_lineage(state.step, state.fence, starts)


def _supersede(checkpoint: Path) -> None:
    target = checkpoint.with_name(f"superseded-{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(checkpoint, target)


def _remove(checkpoint: Path) -> None:
    """Without its final name first, so that a crash leaves no half-deleted checkpoint."""
    removed = checkpoint.with_name(f"{checkpoint.name}{_REMOVED}")
    os.rename(checkpoint, removed)
    shutil.rmtree(removed)


def _sync_entries(folder: Path) -> None:
    """The names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
