"""Converts sharded tensors to one block per process, as torch's distributed checkpoint needs.

It describes a process's part of a tensor by one offset and one shape. Tensor parallelism shards
some matrices differently: of a joint gate and up projection each process has a part of both halves.
Such tensors are gathered along that mesh dimension; all others stay as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard


@torch.no_grad()
def in_blocks(state: Any) -> Any:
    """Convert every tensor in nested dictionaries and lists to blocks. Collective.

    Tensors that are blocks already are returned as they are.
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
    """Undo `in_blocks`: shard the tensors of `state` like those of `like`. Collective."""
    if isinstance(state, dict):
        return {key: sharded_as(value, like[key]) for key, value in state.items()}
    if isinstance(state, list):
        return [sharded_as(value, other) for value, other in zip(state, like, strict=True)]
    if isinstance(state, DTensor) and state.placements != like.placements:
        return state.redistribute(placements=like.placements)
    return state


def _block_placements(tensor: DTensor) -> Sequence[Placement] | None:
    """Placements that give each process one block; None if `tensor` has such placements."""
    placements = [
        Replicate() if _is_scattered(tensor, index) else placement
        for index, placement in enumerate(tensor.placements)
    ]
    return None if tuple(placements) == tuple(tensor.placements) else placements


def _is_scattered(tensor: DTensor, index: int) -> bool:
    """Whether a process's part along this mesh dimension is several pieces.

    A strided shard is one piece if it only says that later mesh dimensions were sharded first, as
    with FSDP over tensor parallelism.
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
