"""Host memory that a GPU copies to and from, of the size that is needed.

torch rounds a pinned tensor up to a power of two of bytes, which takes up to twice the memory, and
keeps it when it is freed. Here pages of the tensor's own are registered with CUDA, until nothing
uses them any more.
"""

import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import _pin_memory_utils as cuda_memory


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Make a tensor, at the beginning of its storage. `pinned`: for copies of a GPU.

    Raises RuntimeError if memory cannot be pinned.
    """
    size = math.prod(shape) * dtype.itemsize
    if not pinned or not size:
        return torch.empty(tuple(shape), dtype=dtype)
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, pages), dtype=torch.uint8, count=size)
    cuda_memory.pin_memory(memory.data_ptr(), pages)
    ended = weakref.finalize(memory.untyped_storage(), cuda_memory.unpin_memory, memory.data_ptr())
    ended.atexit = False  # CUDA is gone by then
    return memory.view(dtype).view(tuple(shape))
