"""Node-wise attention on the CPU with aten's flash kernel, which returns its log-sum-exp.

The operators are private to PyTorch (`scaled_dot_product_attention` uses them for CPU tensors), and
the requirements pin its version. They accept grouped-query heads and any strides, so that nodes are
views and only results are copied.
"""

import torch
from torch import Tensor

from agentrl.training.attention.layout import NodeRun, TreeLayout

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuKernel:
    """A `NodeKernel` for float32, float64, bfloat16 and float16 on the CPU."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `NodeKernel`."""
        out = _token_major(q, _sum_dtype(q))
        lse = _token_major(q[..., :1], _sum_dtype(q))[..., 0]
        for run in layout.runs:
            o, part = _forward(
                _queries(q, run), _keys(k, run), _keys(v, run), 0.0, True, scale=scale
            )
            _queries(out, run).copy_(o)
            _queries(lse, run).copy_(part)
        for span in layout.spans:
            queries, keys = slice(span.query, span.query_end), slice(span.key, span.key_end)
            o, part = _forward(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, False, scale=scale
            )
            before = lse[:, :, queries]
            weight = torch.sigmoid(part - before).unsqueeze(-1)
            out[:, :, queries].lerp_(o.to(out.dtype), weight.to(out.dtype))
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
        for run in layout.runs:
            gradients = _backward(
                _queries(grad, run), _queries(q, run), _keys(k, run), _keys(v, run),
                _queries(out, run), _queries(lse, run), 0.0, True, scale=scale,
            )  # fmt: skip
            _queries(dq, run).copy_(gradients[0])
            _keys(dk, run).copy_(gradients[1])
            _keys(dv, run).copy_(gradients[2])
        for span in layout.spans:
            queries, keys = slice(span.query, span.query_end), slice(span.key, span.key_end)
            gradients = _backward(
                grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys],
                out[:, :, queries], lse[:, :, queries], 0.0, False, scale=scale,
            )  # fmt: skip
            dq[:, :, queries] += gradients[0]
            dk[:, :, keys] += gradients[1]
            dv[:, :, keys] += gradients[2]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype that partial results are added up in."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Empty [1, H, T, D] with the heads of a token side by side, as the kernel lays them out."""
    batch, heads, tokens, width = like.shape
    return like.new_empty((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)


def _nodes(x: Tensor, start: int, run: NodeRun) -> Tensor:
    """[1, H, T, ...] to a view [count, H, length, ...] of the run's nodes."""
    line = x[0][:, start : start + run.count * run.length]
    return torch.unflatten(line, 1, (run.count, run.length)).transpose(0, 1)


def _queries(x: Tensor, run: NodeRun) -> Tensor:
    return _nodes(x, run.query, run)


def _keys(x: Tensor, run: NodeRun) -> Tensor:
    return _nodes(x, run.key, run)
