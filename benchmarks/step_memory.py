"""How far a step rises above the memory that rests between steps, of this process.

On a CPU by the kernel's high-water mark, on a GPU by PyTorch's allocator. glibc gives large blocks
back if the process has `ENVIRONMENT`.
"""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

ENVIRONMENT: Mapping[str, str] = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def rise(step: Callable[[], None]) -> float:
    """MiB of the second step: the first one makes the optimizer's state."""
    step()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - resting) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from now
    resting = _status("VmRSS")
    step()
    return (_status("VmHWM") - resting) / 2**20


def _status(key: str) -> int:
    """A figure of this process in bytes, as the kernel counts it."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024
