"""What one process finds out and all must know, its failure included.

Rank 0 alone holds the run, talks to services and names checkpoints. Whatever it learns there comes
to the others through here, so that none goes on with a default of its own; and what fails on one
process ends all, so that none waits for one that has left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

# What is waited for takes as long as it takes: rows, a disk, a database that is away. A process
# that ends breaks its connections, which ends a wait at once.
_LONGEST_WAIT = timedelta(days=30)


class FailedElsewhere(RuntimeError):
    """Another process has failed and says why; this one ends too."""


class ProcessLost(RuntimeError):
    """Another process has ended. The message is one sentence for the user."""


# How gloo and NCCL say that a connection to another process broke.
_BROKEN = ("gloo/transport/", "ncclRemoteError", "remote process exit")


def process_lost(error: RuntimeError) -> ProcessLost | None:
    """What the error of any collective says of another process: that it has ended, or nothing."""
    if isinstance(error, ProcessLost):
        return error
    return _lost(error) if any(words in str(error) for words in _BROKEN) else None


def _lost(error: RuntimeError) -> ProcessLost:
    return ProcessLost(
        "another process of the trainer has ended; what it said last is in the trainer's log "
        f"({str(error).splitlines()[0]})"
    )


class Agreement:
    """The processes of a run, on a group of their own, which no collective of training waits for.

    Every process makes one and makes the same calls, from one thread at a time. Each raises
    `ProcessLost` if another process has ended.
    """

    def __init__(self) -> None:
        """Collective."""
        self.group = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)

    def from_main(self, ask: Callable[[], T]) -> T:
        """What `ask` returns on rank 0, on all processes.

        If it raises there, the others raise `FailedElsewhere`.
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
            with suppress(ProcessLost):  # what failed first is what to say
                self._broadcast([None, str(error)])
            raise
        self._broadcast([answer, None])
        return answer

    def on_all(self, act: Callable[[], T]) -> T:
        """What `act` returns on each process; it must contain no collective.

        If it raises on some, the first of them raises that and all others `FailedElsewhere`.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = act()
        except Exception as error:  # raised below, when the others know of it
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
        """What each process gives, by rank, on all of them."""
        values: list[T | None] = [None] * dist.get_world_size()
        with _connected():
            dist.all_gather_object(values, value, self.group)
        return cast(list[T], values)

    def any(self, *flags: bool) -> list[bool]:
        """For each of `flags`, whether it is set on some process."""
        on_some = torch.tensor(flags, dtype=torch.uint8)
        with _connected():
            dist.all_reduce(on_some, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in on_some.tolist()]

    def meet(self) -> None:
        """Wait until every process is here."""
        self.any(False)

    def _broadcast(self, box: list[object]) -> None:
        with _connected():
            dist.broadcast_object_list(box, src=0, group=self.group)


def known_to_all(error: Exception) -> Exception:
    """`error`, which every process has got from all: as it is on rank 0, to be said once."""
    return error if dist.get_rank() == 0 else FailedElsewhere(str(error))


@contextmanager
def _connected() -> Iterator[None]:
    """A collective, whose only failure is that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error
