"""Seconds of a step, for benchmarks that run beside other work."""

import time

import torch


def clock() -> float:
    """On a CPU the seconds that this process computed, whatever else the machine did.

    For steps of one thread. On a GPU those of the wall, once the device has done what it was given.
    """
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
