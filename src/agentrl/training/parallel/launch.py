"""Checks, joins and ends the trainer's processes.

Accelerate launches them and reads the environment. The launch is checked here, because Accelerate
may silently start independent processes.
"""

import os
import sys
from typing import NoReturn

import torch.distributed as dist
from accelerate import Accelerator


def check_launch(accelerator: Accelerator) -> None:
    """Raise `RuntimeError` if Accelerate sees another number of processes than were launched."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != asked:
        raise RuntimeError(
            f"the launcher started {asked} processes and Accelerate sees "
            f"{accelerator.num_processes}: launch with assets/fsdp2_cpu.yml or "
            "assets/fsdp2_dst.yml, whose distributed_type is MULTI_GPU"
        )


def join_processes(accelerator: Accelerator) -> None:
    """Initialise the process group, also for one process.

    Raises `RuntimeError` as `check_launch` does.
    """
    check_launch(accelerator)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if accelerator.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend=backend, store=store, rank=0, world_size=1)


def exit_process(status: int) -> NoReturn:
    """End a process that has used collectives, without finalising Python.

    A worker thread of gloo releases a collective's tensors after it has woken the waiter, and needs
    the interpreter for this. If Python finalises at that moment, the thread ends within a
    destructor and the process aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
