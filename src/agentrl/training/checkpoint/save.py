"""What is in a checkpoint, between memory and disk: saved in the background, loaded by any ranks.

Saving stops training only to copy the state into host memory. From there a thread of each process
writes it with torch's distributed checkpoint (DCP), on a process group of its own, while training
goes on. Where to, is what rank 0 says; it looks at every file before the checkpoint gets its name.
Only one save runs at a time; its copy stays in host memory for the next one to reuse.
Loading re-shards: neither the number of processes nor the parallel degrees need be those that
saved. Not in here: names, atomicity and whose run a checkpoint is (`checkpoint`).
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
    """Saves checkpoints in the background. Every process makes one and makes the same calls."""

    def __init__(
        self, output: Path, save_total_limit: int | None, hold: Callable[[], None]
    ) -> None:
        """`output`: the run's folder, on a disk that all processes see. Collective.

        `hold`: asked on rank 0, in the saver's thread, before a checkpoint is written and before it
        gets its name; raises if another trainer has taken the run.
        """
        self._output = output
        self._limit = save_total_limit
        self._hold = hold
        self._agreement = Agreement()  # of its own, because it is used from another thread
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
        self.seconds: float | None = None  # that the last save took, from copy to name

    def save(self, learner: Stateful, state: TrainerState) -> None:
        """Begin to save; when this returns, `learner` may change. Collective.

        Waits for the save before this one and raises its error, see `wait`.
        """
        self.wait()
        began = time.monotonic()
        content = in_blocks({**learner.state_dict(), **_own_random_state()})
        staged = self._stager.stage(content)
        assert not isinstance(staged, Future), "it was staged at once"
        self._running = Future()
        # a daemon: a write that hangs does not keep a process alive that failed otherwise
        threading.Thread(
            target=self._settle,
            args=(self._running, staged, state, began),
            name="checkpoint",
            daemon=True,
        ).start()

    @property
    def failed(self) -> bool:
        """Whether the last save has ended with an error, which `wait` raises."""
        running = self._running
        return running is not None and running.done() and running.exception() is not None

    def wait(self) -> None:
        """Wait for the save that runs to be on disk, on all processes.

        Raises on rank 0 `CheckpointError` if a disk refuses, or what `hold` raised, and on the
        others `FailedElsewhere`.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def close(self) -> None:
        """Wait for the save that runs, whatever comes of it, and give the memory back."""
        if self._running is not None:
            self._running.exception()
        self._stager.close()

    def _settle(
        self, future: "Future[None]", staged: Mapping[str, Any], state: TrainerState, began: float
    ) -> None:
        try:
            self._write(staged, state)
            self.seconds = time.monotonic() - began
        except BaseException as error:  # handed to the waiter, whatever it is
            future.set_exception(error)
        else:
            future.set_result(None)

    def _write(self, staged: Mapping[str, Any], state: TrainerState) -> None:
        final = checkpoint_path(self._output, state.step)
        folder = self._agreement.from_main(lambda: self._begin(final, state))
        try:
            save(dict(staged), checkpoint_id=folder, process_group=self._agreement.group)
        except CheckpointException as error:  # on all processes, wherever it failed
            raise known_to_all(_refused(final, failure_reason(error))) from error
        self._agreement.from_main(lambda: self._finish(folder, final, state))

    def _begin(self, final: Path, state: TrainerState) -> Path:
        """The folder for all processes to write to. For rank 0, as `_finish` is."""
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
    """Load a checkpoint into `learner`; any number of processes may have saved it. Collective.

    Random states are restored if the number of processes is the same. Raises `CheckpointError`.
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
    """That all files of DCP in `folder` are there, can be opened and are as long as its index says.

    What is in them is not read, so that it takes no time. Raises `OSError`.
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
    """What DCP failed at, on the first process that failed; its own message is pages long."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (first, _) = min(error.failures.items())
    return f"{first or type(first).__name__} (process {rank})"


def _own_random_state() -> dict[str, Any]:
    """This process's random state, under its own key."""
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
    """A block that writes to the disk. An `OSError` in it becomes a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise _refused(final, str(error)) from error


def _refused(final: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {final} cannot be written: {reason}")
