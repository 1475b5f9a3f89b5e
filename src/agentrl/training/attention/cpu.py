"""Attention on the CPU, block by block, with aten's flash kernel, which returns its log-sum-exp.

The operators are private to PyTorch (`scaled_dot_product_attention` uses them for CPU tensors), and
the requirements pin its version. They accept grouped-query heads and any strides, so that blocks
are views and only results are copied.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from agentrl.training.attention.blocks import Block, blocks
from agentrl.training.attention.layout import TreeLayout

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuKernel:
    """A `NodeKernel` for float32, float64, bfloat16 and float16 on the CPU."""

    def __init__(self) -> None:
        self._blocks: WeakKeyDictionary[TreeLayout, list[Block]] = WeakKeyDictionary()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `NodeKernel`."""
        out = _token_major(q, _sum_dtype(q))
        lse = _token_major(q[..., :1], _sum_dtype(q))[..., 0]
        for block in self._of(layout):
            o, part = _forward(
                _queries(q, block), _keys(k, block), _keys(v, block), 0.0, block.causal, scale=scale
            )
            whole, before = _queries(out, block), _queries(lse, block)
            if block.causal:  # the first of its queries
                whole.copy_(o)
                before.copy_(part)
            else:
                weight = torch.sigmoid(part - before).unsqueeze(-1)
                whole.lerp_(o.to(out.dtype), weight.to(out.dtype))
                torch.logaddexp(before, part.to(before.dtype), out=before)
        return out.to(q.dtype), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: TreeLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `NodeKernel`."""
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        dq = _token_major(q, _sum_dtype(q))
        dk, dv = _token_major(k, _sum_dtype(k)), _token_major(v, _sum_dtype(v))
        if layout.n_queries < layout.n_tokens:  # keys that no run writes
            dk.zero_()
            dv.zero_()
        for block in self._of(layout):
            gradients = _backward(
                _queries(grad, block), _queries(q, block), _keys(k, block), _keys(v, block),
                _queries(out, block), _queries(lse, block), 0.0, block.causal, scale=scale,
            )  # fmt: skip
            sums = _queries(dq, block), _keys(dk, block), _keys(dv, block)
            for whole, part in zip(sums, gradients, strict=True):
                if block.causal:
                    whole.copy_(part)
                else:
                    whole += part
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _of(self, layout: TreeLayout) -> list[Block]:
        if layout not in self._blocks:
            self._blocks[layout] = blocks(layout)
        return self._blocks[layout]


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype that partial results are added up in."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Empty [1, H, T, D] with the heads of a token side by side, as the kernel lays them out."""
    batch, heads, tokens, width = like.shape
    return like.new_empty((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)


def _parts(x: Tensor, start: int, length: int, block: Block) -> Tensor:
    """[1, H, T, ...] to a view [count, H, length, ...] of the block's queries or keys."""
    _, by_head, by_token, *rest = x.stride()
    return x.as_strided(
        (block.count, x.shape[1], length, *x.shape[3:]),
        (block.stride * by_token, by_head, by_token, *rest),
        x.storage_offset() + start * by_token,
    )


def _queries(x: Tensor, block: Block) -> Tensor:
    return _parts(x, block.query, block.queries, block)


def _keys(x: Tensor, block: Block) -> Tensor:
    return _parts(x, block.key, block.keys, block)
