"""Checkpoints of the trainer: sharded, atomic, loadable by any number of processes.

A checkpoint is the folder `checkpoint-STEP` of a run's output: the model, optimizer and schedule
as torch's distributed checkpoint (DCP), each rank's random state, and `trainer_state.json` with
the position in the data ledger. It is written under another name, synced to disk and renamed
last, so that a folder with its final name is always whole. Saving is synchronous: training goes
on when the checkpoint is on disk.
"""

import io
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from agentrl.configs import Config
from agentrl.databases.connection import without_password
from agentrl.databases.documents import TrainerStart
from agentrl.databases.runs import in_lineage

STATE_FILE = "trainer_state.json"
# Of a model with an adapter the adapter only: all else is as its folder has it.
_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
_NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message is one sentence for the user."""


@dataclass(frozen=True)
class TrainerState:
    """Where the run is. Its rows are those that the ledger says were trained up to `step`."""

    step: int  # optimizer steps done
    version: int  # policy version that these weights were or will be published as
    run_name: str
    config: Mapping[str, Any]  # the flags, by group, for people to read
    fence: int = 0  # number of the trainer that saved it


def recorded_config(config: Config) -> dict[str, dict[str, Any]]:
    """The flags by group, without secrets: what checkpoints and trackers keep of them."""
    flags = asdict(config)
    flags["agent"]["mcp_auth_token"] = None
    url = flags["run"]["db_connection_string"]
    flags["run"]["db_connection_string"] = without_password(url) if url else None
    return flags


def checkpoint_path(output: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return output / f"checkpoint-{step}"


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
    try:
        return TrainerState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} is no complete checkpoint ({STATE_FILE}: {error})"
        ) from None


def save_checkpoint(
    output: Path,
    state: TrainerState,
    model: PreTrainedModel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    save_total_limit: int | None,
) -> Path:
    """Write the checkpoint of `state.step`, then remove the oldest beyond `save_total_limit`.

    Collective: every rank calls it. Raises `CheckpointError` if the disk refuses.
    """
    rank = dist.get_rank()
    final = checkpoint_path(output, state.step)
    partial = output / f"{final.name}.partial"
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        save(_state_dict(model, optimizer, scheduler), checkpoint_id=partial)
        (partial / f"random-{rank}.pt").write_bytes(_to_bytes(_random_state()))
        dist.barrier()
        if rank == 0:
            (partial / STATE_FILE).write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
            _sync(partial)
            os.rename(partial, final)
            _sync_entry(output)
            for old in list_checkpoints(output)[: -save_total_limit if save_total_limit else 0]:
                _remove(old)
        dist.barrier()
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {final} cannot be written: {error}") from error
    return final


def load_checkpoint(
    checkpoint: Path, model: PreTrainedModel, optimizer: Optimizer, scheduler: LRScheduler
) -> TrainerState:
    """Load it in place, saved by whatever number of processes. Collective.

    Random states are restored if the number of processes is the same. Raises `CheckpointError`.
    """
    state = read_state(checkpoint)
    loaded = _state_dict(model, optimizer, scheduler)
    try:
        load(loaded, checkpoint_id=checkpoint)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=_TRAINED_ONLY,
    )
    scheduler.load_state_dict(loaded["scheduler"])
    if len(list(checkpoint.glob("random-*.pt"))) == dist.get_world_size():
        _restore_random_state(torch.load(checkpoint / f"random-{dist.get_rank()}.pt"))
    return state


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
            target = output / f"superseded-{folder.name}"
            shutil.rmtree(target, ignore_errors=True)
            os.rename(folder, target)
    _sync_entry(output)


def _in_lineage(checkpoint: Path, starts: Sequence[TrainerStart]) -> bool:
    state = read_state(checkpoint)
    return in_lineage(state.step, state.fence, starts)


def _state_dict(
    model: PreTrainedModel, optimizer: Optimizer, scheduler: LRScheduler
) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_TRAINED_ONLY)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
    }


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _to_bytes(state: Mapping[str, Any]) -> bytes:
    """As `torch.save` writes it; in memory first, because it hides what the disk says."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _remove(checkpoint: Path) -> None:
    """Without its final name first, so that a crash leaves no half-deleted checkpoint."""
    removed = checkpoint.with_name(f"{checkpoint.name}.removed")
    os.rename(checkpoint, removed)
    shutil.rmtree(removed)


def _sync(folder: Path) -> None:
    """Files of `folder`, then its entries, to the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _sync_entry(folder)


def _sync_entry(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
