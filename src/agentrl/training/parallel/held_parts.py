"""Which part of a sharded tensor a process holds, and how parts make up the whole.

With FSDP a part is a range of rows, with tensor parallelism also a range of columns. Of a joint
gate and up projection each tensor-parallel process has a range of both halves.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

Ranges = tuple[tuple[int, int], ...]
"""(start, stop) along one dimension of the whole, in the order in which the part has them."""
Part = tuple[Ranges, ...]
"""The ranges of each dimension. The part is their product."""


def held_part(tensor: Tensor) -> Part:
    """The part that this process holds; all of a tensor that is not sharded. No communication."""
    if not isinstance(tensor, DTensor):
        return tuple(((0, size),) for size in tensor.shape)
    part = tuple(_held_ranges(tensor, dim) for dim in range(tensor.ndim))
    held = tuple(sum(stop - start for start, stop in ranges) for ranges in part)
    assert held == tuple(tensor.to_local().shape), f"{held} of {tensor.placements}"
    return part


def local_part(tensor: Tensor) -> Tensor:
    """The values that this process holds, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_shape(part: Part) -> tuple[int, ...]:
    """The shape of a part's own tensor."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in part)


def place(values: Tensor, part: Part, whole: Tensor) -> None:
    """Copy the values of a part to their places in the whole."""
    for there, here in _blocks(part):
        whole[there].copy_(values[here])


def in_place(part: Part, whole: Tensor) -> Tensor | None:
    """The memory of a part in the whole; None if it is not contiguous."""
    blocks = list(_blocks(part))
    if len(blocks) != 1:
        return None
    view = whole[blocks[0][0]]
    return view if view.is_contiguous() else None


def _held_ranges(tensor: DTensor, dim: int) -> Ranges:
    """The ranges of a dimension that this process holds: the numbers 0, 1, … sharded like it."""
    sharded = [
        _along(placement) if _shards(placement, dim, tensor.ndim) else Replicate()
        for placement in tensor.placements
    ]
    device = tensor.device_mesh.device_type
    numbers = torch.arange(tensor.shape[dim], device=device)
    held = distribute_tensor(numbers, tensor.device_mesh, sharded, src_data_rank=None).to_local()
    if len(held) == 0:
        return ((0, 0),)
    ends = (held.diff() != 1).nonzero().flatten() + 1
    runs = held.tensor_split(ends.cpu())
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


def _shards(placement: Placement, dim: int, ndim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim % ndim == dim


def _along(placement: Placement) -> Placement:
    """The same placement for a tensor of one dimension."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def _blocks(part: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each block of a part: where it is in the whole, and in the part's own tensor."""
    dims = []
    for ranges in part:
        pairs, at = [], 0
        for start, stop in ranges:
            pairs.append((slice(start, stop), slice(at, at + stop - start)))
            at += stop - start
        dims.append(pairs)
    for block in product(*dims):
        yield tuple(there for there, _ in block), tuple(here for _, here in block)
