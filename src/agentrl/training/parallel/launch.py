"""The trainer's processes: checked, joined, ended.

Accelerate launches them and reads the environment. What it made of the launch is asserted here,
because it says nothing when it quietly starts independent processes.
"""

import os
import sys
from typing import NoReturn

import torch.distributed as dist
from accelerate import Accelerator


def check_launch(accelerator: Accelerator) -> None:
    """Refuse a launch whose processes do not know of each other.

    Raises `RuntimeError` if the launcher started another number of processes than Accelerate sees.
    """
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != asked:
        raise RuntimeError(
            f"the launcher started {asked} processes and Accelerate sees "
            f"{accelerator.num_processes}: launch with assets/fsdp2_cpu.yml or "
            "assets/fsdp2_dst.yml, whose distributed_type is MULTI_GPU"
        )


def join_processes(accelerator: Accelerator) -> None:
    """Make the process group, of one process if it is alone.

    Raises `RuntimeError` if the launch is not what was asked for, see `check_launch`.
    """
    check_launch(accelerator)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if accelerator.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend=backend, store=store, rank=0, world_size=1)


def exit_process(status: int) -> NoReturn:
    """End a process that has used collectives, without finalising Python.

    A worker thread of gloo lets go of a collective's tensors only after it has woken the waiter,
    and needs the interpreter for that. Should Python finalise just then, it ends the thread in the
    middle of a destructor, which aborts a process that has done all its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
