"""Shares decisions and failures between the processes of the trainer.

Only rank 0 holds the run's lease, talks to services and names checkpoints. `Agreement` sends its
results to the other processes. A failure on one process ends all of them, so that none waits for a
process that has left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

# Waits for rows, disks or databases have no natural limit. A process that ends breaks its
# connections, which ends a wait at once.
_LONGEST_WAIT = timedelta(days=30)


class FailedElsewhere(RuntimeError):
    """Another process has failed and logs the reason; this one ends too."""


class ProcessLost(RuntimeError):
    """Another process has ended. The message is one sentence for the user."""


# Parts of the messages of gloo and NCCL about a broken connection.
_BROKEN = ("gloo/transport/", "ncclRemoteError", "remote process exit")


def process_lost(error: RuntimeError) -> ProcessLost | None:
    """Convert the error of a collective to `ProcessLost`; None if no process has ended."""
    if isinstance(error, ProcessLost):
        return error
    return _lost(error) if any(words in str(error) for words in _BROKEN) else None


def _lost(error: RuntimeError) -> ProcessLost:
    return ProcessLost(
        "another process of the trainer has ended; what it said last is in the trainer's log "
        f"({str(error).splitlines()[0]})"
    )


class Agreement:
    """Agreement of all processes of a run, over a separate gloo group.

    All processes make one and make the same calls, from one thread at a time. Each call raises
    `ProcessLost` if another process has ended.
    """

    def __init__(self) -> None:
        """Collective."""
        self.group = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)

    def from_main(self, ask: Callable[[], T]) -> T:
        """Call `ask` on rank 0 and return its result on all processes. Collective.

        If it raises, the other processes raise `FailedElsewhere`.
        """
        if dist.get_rank() != 0:
            box: list[object] = [None, None]
            self._broadcast(box)
            answer, failure = box
            if failure is not None:
                raise FailedElsewhere(f"process 0 has failed: {failure}")
            return cast(T, answer)
        try:
            answer = ask()
        except Exception as error:
            with suppress(ProcessLost):  # the first error is raised
                self._broadcast([None, str(error)])
            raise
        self._broadcast([answer, None])
        return answer

    def on_all(self, act: Callable[[], T]) -> T:
        """Call `act`, which must contain no collective, and return its result. Collective.

        If it raises on some processes, the first of them raises its error and all others
        `FailedElsewhere`.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = act()
        except Exception as error:  # raised below, after the other processes know of it
            failure = error
        told: list[str | None] = [None] * dist.get_world_size()
        with _connected():
            dist.all_gather_object(told, None if failure is None else str(failure), self.group)
        failed = [rank for rank, why in enumerate(told) if why is not None]
        if not failed:
            return cast(T, result)
        if failure is not None and failed[0] == dist.get_rank():
            raise failure
        raise FailedElsewhere(f"process {failed[0]} has failed: {told[failed[0]]}") from failure

    def gather(self, value: T) -> list[T]:
        """Gather each process's value, by rank, on all processes. Collective."""
        values: list[T | None] = [None] * dist.get_world_size()
        with _connected():
            dist.all_gather_object(values, value, self.group)
        return cast(list[T], values)

    def to_main(self, value: T) -> list[T]:
        """Gather each process's value, by rank, on rank 0; the others get nothing. Collective."""
        at_main = dist.get_rank() == 0
        values: list[T | None] | None = [None] * dist.get_world_size() if at_main else None
        with _connected():
            dist.gather_object(value, values, dst=0, group=self.group)
        return cast(list[T], values or [])

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any process. Collective."""
        on_some = torch.tensor(flags, dtype=torch.uint8)
        with _connected():
            dist.all_reduce(on_some, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in on_some.tolist()]

    def meet(self) -> None:
        """Wait for all processes. Collective."""
        self.any(False)

    def _broadcast(self, box: list[object]) -> None:
        with _connected():
            dist.broadcast_object_list(box, src=0, group=self.group)


def known_to_all(error: Exception) -> Exception:
    """An error that all processes have: itself on rank 0, else `FailedElsewhere`.

    It is thus reported once.
    """
    return error if dist.get_rank() == 0 else FailedElsewhere(str(error))


@contextmanager
def _connected() -> Iterator[None]:
    """Convert the error of a collective in the block to `ProcessLost`."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error
