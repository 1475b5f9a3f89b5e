"""Attention over a forest with FlexAttention's block masks, for CUDA in float32.

Fully masked blocks are skipped, and no dense mask is computed.
"""

from collections.abc import Callable
from functools import cache
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from agentrl.training.attention.layout import TreeLayout

_masks: WeakKeyDictionary[TreeLayout, BlockMask] = WeakKeyDictionary()


def flex_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """`tree_attention` with FlexAttention. It is differentiable on CUDA only."""
    if layout not in _masks:
        _masks[layout] = _mask(layout, q.device)
    attend = _compiled() if q.device.type == "cuda" else _by_definition
    return attend(q, k, v, block_mask=_masks[layout], scale=scale, enable_gqa=True)


_by_definition = cast(Callable[..., Tensor], flex_attention)


@cache
def _compiled() -> Callable[..., Tensor]:
    # Layouts differ in their number of tokens.
    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=True))


def _mask(layout: TreeLayout, device: torch.device) -> BlockMask:
    until = torch.from_numpy(layout.visible_until).to(device)
    first = layout.queries[0]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = query + first
        return (key <= token) & (token < until[key])

    return create_block_mask(
        sees, None, None, layout.n_queries, layout.n_tokens, device=str(device)
    )
