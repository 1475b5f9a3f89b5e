"""The folder of a checkpoint, its state file, and the lineage of a run's checkpoints.

A checkpoint is the folder `checkpoint-STEP` of a run's output. It has the learner's state and the
random state of each process as torch's distributed checkpoint (DCP), and `trainer_state.json` with
the position in the data ledger. A folder with its final name is always complete: it is written
under another name, synced to disk and renamed last. `save` writes and reads the DCP files.
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
_PARTIAL, _REMOVED = ".partial", ".removed"  # suffixes of incomplete folders


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message is one sentence for the user."""


@dataclass(frozen=True)
class TrainerState:
    """The position of a run. The ledger has the rows that were trained up to `step`."""

    step: int  # optimizer steps done
    version: int  # policy version that these weights were or will be published as
    run_name: str
    config: Mapping[str, Any]  # `recorded_config`; a resume compares the fixed flags
    fence: int  # fencing number of the trainer that saved it
    processes: int  # number of processes that saved it


def recorded_config(config: Config) -> dict[str, dict[str, Any]]:
    """The flags by group and name, without secrets, for checkpoints and trackers."""
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
    """The folder where the checkpoint of `state` is written until it is complete.

    The name has the fencing number, so a replaced trainer never writes to its successor's folder.
    """
    return output / f"{checkpoint_path(output, state.step).name}.{state.fence}{_PARTIAL}"


def list_checkpoints(output: Path) -> list[Path]:
    """The run's complete checkpoints, ordered by step."""
    found = []
    for folder in output.glob("checkpoint-*"):
        match = _NAME.fullmatch(folder.name)
        if match and (folder / STATE_FILE).is_file():
            found.append((int(match[1]), folder))
    return [folder for _, folder in sorted(found)]


def read_state(checkpoint: Path) -> TrainerState:
    """Read `trainer_state.json`. Raises `CheckpointError` if the folder is no checkpoint."""
    if (checkpoint / "config.json").is_file():  # such as a checkpoint of transformers.Trainer
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
    """Write the state file and rename the folder to its final name. For rank 0.

    The other files must be complete and synced. Then the oldest checkpoints beyond
    `save_total_limit` are removed; None keeps all.
    """
    partial, final = partial_path(output, state), checkpoint_path(output, state.step)
    with (partial / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump(asdict(state), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync_entries(partial)
    if final.exists():  # saved by a replaced trainer
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
    """The checkpoints that the run may resume from, by step. `starts`: where trainers began."""
    return [folder for folder in list_checkpoints(output) if _in_lineage(folder, starts)]


def supersede_others(output: Path, step: int, starts: Sequence[TrainerStart]) -> None:
    """Rename checkpoints that are not part of a run that resumes from `step`. For rank 0.

    These are checkpoints of later steps, whose rows are trained again, and of replaced trainers.
    The new name only informs people: `lineage_checkpoints` does not need it.
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
    """Rename a checkpoint, then delete it, so that a crash leaves no incomplete checkpoint."""
    removed = checkpoint.with_name(f"{checkpoint.name}{_REMOVED}")
    os.rename(checkpoint, removed)
    shutil.rmtree(removed)


def _sync_entries(folder: Path) -> None:
    """Sync the directory entries of `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
