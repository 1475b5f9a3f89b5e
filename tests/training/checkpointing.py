"""A learner of one process that saves checkpoints; and a process of its own that dies at it."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from tiny import linear_rows, sequences_of, tiny_model
from worker import CONFIG, STEPS

from agentrl.databases.documents import DBRecordData
from agentrl.training.checkpoint.layout import TrainerState
from agentrl.training.checkpoint.save import CheckpointSaver, load_checkpoint
from agentrl.training.parallel import make_mesh
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import StepStatistics

ROWS = linear_rows(6)
_CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}  # audit events


class Training:
    """A learner of one process and its checkpoints, as the trainer has them."""

    def __init__(self, output: Path, seed: int = 0, limit: int | None = None) -> None:
        self.learner = Learner(
            tiny_model(seed=seed), make_mesh(Accelerator(cpu=True)), CONFIG, STEPS
        )
        self.hold: Callable[[], object] = lambda: None  # the run is ours
        self.saver = CheckpointSaver(output, limit, self._hold)

    def _hold(self) -> None:
        self.hold()

    def step(self, rows: list[DBRecordData]) -> StepStatistics:
        return self.learner.step([sequences_of(row) for row in rows])

    def begin_to_save(self, step: int, fence: int = 1) -> None:
        state = TrainerState(step, step, "run", config={}, fence=fence, processes=1)
        self.saver.save(self.learner, state)

    def save(self, step: int, fence: int = 1) -> None:
        self.begin_to_save(step, fence)
        self.saver.wait()

    def load(self, checkpoint: Path) -> TrainerState:
        return load_checkpoint(checkpoint, self.learner)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor().clone() for parameter in self.learner.model.parameters()]


def die_saving(output: Path, change: int, size: int | None = None) -> None:
    """Save checkpoint 1 and, while the next step goes on, 2, which removes 1. For a process.

    It is killed right before the change of that number, counted from 1, that the second save makes
    to the disk, a sync included; or when a file of it is to grow beyond `size` bytes.
    """
    training = Training(output, limit=1)
    training.step(ROWS)
    training.save(1)
    training.step(ROWS)
    if size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    changes = 0

    def count() -> None:
        nonlocal changes
        if threading.current_thread().name == "checkpoint":
            changes += 1
            if changes == change:
                os.kill(os.getpid(), signal.SIGKILL)

    sync = os.fsync

    def counted_sync(descriptor: int) -> None:
        count()
        sync(descriptor)

    os.fsync = counted_sync  # type: ignore[assignment]
    sys.addaudithook(
        lambda event, arguments: (
            count() if event in _CHANGES and str(output) in str(arguments[0]) else None
        )
    )
    training.begin_to_save(2)
    training.step(ROWS)
    training.saver.wait()
    os._exit(0)
