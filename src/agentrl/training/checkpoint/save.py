"""Saves checkpoints in the background, and loads them on any number of processes.

Training pauses only while the state is copied into host memory. A thread of each process then
writes it with torch's distributed checkpoint (DCP), over a separate process group. Rank 0 chooses
the folder, and checks all files before the checkpoint gets its name. One save runs at a time, and
the next one reuses its host memory. Loading re-shards: the number of processes and the parallel
degrees may differ from those of the save. `layout` has names, atomicity and lineage.
"""

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from agentrl.training.checkpoint.blocks import in_blocks, sharded_as
from agentrl.training.checkpoint.layout import (
    CheckpointError,
    TrainerState,
    begin_checkpoint,
    checkpoint_path,
    finish_checkpoint,
    read_state,
)
from agentrl.training.parallel.agreement import Agreement, known_to_all

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves checkpoints in the background. All processes make one and make the same calls."""

    def __init__(
        self, output: Path, save_total_limit: int | None, hold: Callable[[], None]
    ) -> None:
        """Collective. `output`: the run's folder, on a disk that all processes see.

        `save_total_limit`: how many checkpoints are kept; None for all. `hold`: called on rank 0 in
        the saver's thread, before a checkpoint is written and again before it gets its name; raises
        if another trainer has taken the run.
        """
        self._output = output
        self._limit = save_total_limit
        self._hold = hold
        self._agreement = Agreement()  # a separate one, because another thread uses it
        on_gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self._running: Future[None] | None = None
        self.seconds: float | None = None  # duration of the last save, from copy to rename

    def save(self, learner: Stateful, state: TrainerState) -> None:
        """Begin to save `learner`, which may change after the return. Collective.

        Waits for the previous save and raises its error, as `wait` does.
        """
        self.wait()
        began = time.monotonic()
        content = in_blocks({**learner.state_dict(), **_own_random_state()})
        staged = self._stager.stage(content)
        assert not isinstance(staged, Future), "it was staged at once"
        self._running = Future()
        # A daemon, so that a hanging write does not keep a failed process alive.
        threading.Thread(
            target=self._settle,
            args=(self._running, staged, state, began),
            name="checkpoint",
            daemon=True,
        ).start()

    @property
    def failed(self) -> bool:
        """Whether the last save has failed. `wait` raises its error."""
        running = self._running
        return running is not None and running.done() and running.exception() is not None

    def wait(self) -> None:
        """Wait until the running save is on disk, on all processes.

        If it failed, rank 0 raises `CheckpointError` or the error of `hold`, and the other ranks
        raise `FailedElsewhere`.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def close(self) -> None:
        """Wait for the running save without raising its error, and free the host memory."""
        if self._running is not None:
            self._running.exception()
        self._stager.close()

    def _settle(
        self, future: "Future[None]", staged: Mapping[str, Any], state: TrainerState, began: float
    ) -> None:
        try:
            self._write(staged, state)
            self.seconds = time.monotonic() - began
        except BaseException as error:  # raised by `wait`
            future.set_exception(error)
        else:
            future.set_result(None)

    def _write(self, staged: Mapping[str, Any], state: TrainerState) -> None:
        final = checkpoint_path(self._output, state.step)
        folder = self._agreement.from_main(lambda: self._begin(final, state))
        try:
            save(dict(staged), checkpoint_id=folder, process_group=self._agreement.group)
        except CheckpointException as error:  # raised on all processes
            raise known_to_all(_refused(final, failure_reason(error))) from error
        self._agreement.from_main(lambda: self._finish(folder, final, state))

    def _begin(self, final: Path, state: TrainerState) -> Path:
        """Make the folder that all processes write to. For rank 0."""
        self._hold()
        with _in_a_sentence(final):
            return begin_checkpoint(self._output, state)

    def _finish(self, folder: Path, final: Path, state: TrainerState) -> None:
        with _in_a_sentence(final):
            check_files(folder)
        self._hold()
        with _in_a_sentence(final):
            finish_checkpoint(self._output, state, self._limit)
        logger.info("saved %s", final)


def load_checkpoint(checkpoint: Path, learner: Stateful) -> TrainerState:
    """Load a checkpoint into `learner`, saved by any number of processes. Collective.

    Random states are restored only if the number of processes is the same. Raises
    `CheckpointError`; if DCP fails, ranks other than 0 raise `FailedElsewhere`.
    """
    state = read_state(checkpoint)
    random = _own_random_state() if state.processes == dist.get_world_size() else {}
    content = {**learner.state_dict(), **random}
    stored = in_blocks(content)
    try:
        load(stored, checkpoint_id=checkpoint)
    except (OSError, CheckpointException) as error:
        refusal = f"checkpoint {checkpoint} cannot be read: {failure_reason(error)}"
        raise known_to_all(CheckpointError(refusal)) from error
    content = sharded_as(stored, like=content)
    learner.load_state_dict(content)
    if random:
        _restore_random_state(content)
    return state


def check_files(folder: Path) -> None:
    """Check that all DCP files in `folder` can be opened and have the lengths of its index.

    Their content is not read, to save time. Raises `OSError`.
    """
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise OSError(f"its index cannot be read again ({error})") from error
    lengths: dict[str, int] = {}
    for part in stored.values():
        end = part.offset + part.length
        lengths[part.relative_path] = max(end, lengths.get(part.relative_path, 0))
    for name, length in sorted(lengths.items()):
        if not (folder / name).is_file():
            raise OSError(f"{name} is not there: is --output_dir on a disk that all processes see?")
        with (folder / name).open("rb") as file:
            found = file.seek(0, os.SEEK_END)
        if found != length:
            raise OSError(f"{name} has {found} of the {length} bytes that were written")


def failure_reason(error: BaseException) -> str:
    """The error of the first process that failed, in place of DCP's long message."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (first, _) = min(error.failures.items())
    return f"{first or type(first).__name__} (process {rank})"


def _own_random_state() -> dict[str, Any]:
    """This process's random state, under a key with its rank."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return {f"random-{dist.get_rank()}": state}


def _restore_random_state(content: Mapping[str, Any]) -> None:
    state = content[f"random-{dist.get_rank()}"]
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def _in_a_sentence(final: Path) -> Iterator[None]:
    """Raise an `OSError` of the block as `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise _refused(final, str(error)) from error


def _refused(final: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {final} cannot be written: {reason}")
