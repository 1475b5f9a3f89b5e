"""Two processes that agree, for tests: what each of them gets of what the other finds out."""

import os
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch.distributed as dist
from forked import FORKS

from agentrl.training.parallel.agreement import Agreement, FailedElsewhere, ProcessLost

Scene = Callable[[Agreement, int], object]


def in_two(scene: Scene, folder: Path) -> list[object]:
    """What `scene` gives on rank 0 and on rank 1, an error as its type and message."""
    answers: SimpleQueue[tuple[int, object]] = FORKS.SimpleQueue()
    processes = [
        FORKS.Process(target=_play, args=(scene, rank, folder / "store", answers), daemon=True)
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode is not None, "it hangs"
    found: dict[int, object] = {}
    while not answers.empty():
        rank, answer = answers.get()
        found[rank] = answer
    return [found.get(0), found.get(1)]


def _play(scene: Scene, rank: int, store: Path, answers: "SimpleQueue[tuple[int, object]]") -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    agreement = Agreement()
    try:
        answer = scene(agreement, rank)
    except (FailedElsewhere, ProcessLost, ValueError) as error:
        answer = (type(error).__name__, str(error))
    answers.put((rank, answer))
    os._exit(0)


def asks_main(agreement: Agreement, rank: int) -> object:
    return agreement.from_main(lambda: {"fence": 3 + rank})


def main_fails(agreement: Agreement, rank: int) -> object:
    def fail() -> None:
        raise ValueError("the run is taken")

    agreement.from_main(fail)
    return "went on"


def second_fails(agreement: Agreement, rank: int) -> object:
    def look() -> str:
        if rank == 1:
            raise ValueError("no such folder here")
        return "fine"

    return agreement.on_all(look)


def second_stops(agreement: Agreement, rank: int) -> object:
    return agreement.any(rank == 1, False)


def second_dies(agreement: Agreement, rank: int) -> object:
    agreement.any(False)  # rank 0 is there too: before, gloo's own set-up would miss it
    if rank == 1:
        os._exit(0)
    return agreement.from_main(lambda: "alone") and agreement.any(False)
