"""Seconds of a step, for benchmarks that run beside other work."""

import time

import torch


def clock() -> float:
    """On a CPU the CPU seconds of this process, which other work does not change.

    For steps of one thread. On a GPU the wall time, after synchronising the device.
    """
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
