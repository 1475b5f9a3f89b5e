"""Sharded tensors as torch's distributed checkpoint can store them: a process, one block.

It knows a process's part of a tensor by one offset and one shape. Tensor parallelism shards some
matrices otherwise: of gate and up projections that are one matrix each process has a part of both
halves. Those are gathered along such a mesh dimension for as long as it takes; all others are left
as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard


@torch.no_grad()
def in_blocks(state: Any) -> Any:
    """`state`, dictionaries and lists of tensors and others, with every tensor in blocks.

    What is in blocks already is the same object. Collective.
    """
    if isinstance(state, dict):
        return {key: in_blocks(value) for key, value in state.items()}
    if isinstance(state, list):
        return [in_blocks(value) for value in state]
    if isinstance(state, DTensor):
        placements = _block_placements(state)
        return state if placements is None else state.redistribute(placements=placements)
    return state


@torch.no_grad()
def sharded_as(state: Any, like: Any) -> Any:
    """Undo `in_blocks`: `state` with its tensors sharded as those of `like` are. Collective."""
    if isinstance(state, dict):
        return {key: sharded_as(value, like[key]) for key, value in state.items()}
    if isinstance(state, list):
        return [sharded_as(value, other) for value, other in zip(state, like, strict=True)]
    if isinstance(state, DTensor) and state.placements != like.placements:
        return state.redistribute(placements=like.placements)
    return state


def _block_placements(tensor: DTensor) -> Sequence[Placement] | None:
    """Placements without those that leave a process more than one block; None if it has none."""
    placements = [
        Replicate() if _is_scattered(tensor, index) else placement
        for index, placement in enumerate(tensor.placements)
    ]
    return None if tuple(placements) == tuple(tensor.placements) else placements


def _is_scattered(tensor: DTensor, index: int) -> bool:
    """Whether a process's part along this mesh dimension is several pieces of the whole.

    A strided shard is one piece where it only says that later mesh dimensions came first, as with
    FSDP over tensor parallelism.
    """
    placement = tensor.placements[index]
    if not isinstance(placement, _StridedShard):
        return False
    sharded_before = 1
    for other in range(index + 1, tensor.device_mesh.ndim):
        later = tensor.placements[other]
        if isinstance(later, (Shard, _StridedShard)) and later.dim == placement.dim:
            sharded_before *= tensor.device_mesh.size(other)
    return placement.split_factor != sharded_before
