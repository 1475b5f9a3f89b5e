"""Exact attention over a forest, node by node, with gradients. One kernel interface, per device.

Partial results of one query over several slices of keys are merged by their log-sum-exp:

    lse = log(e^lse1 + e^lse2),   out = out1 e^(lse1 - lse) + out2 e^(lse2 - lse)

The backward pass does not differentiate the merge. Flash attention's backward computes
P = exp(q k^T - lse) and dS = P * (dO v^T - rowsum(dO * O)), which for a slice of the keys is the
exact gradient of the whole when `lse` and O are those of the whole (FlashAttention, arXiv
2205.14135, appendix B.4; the same identity as in ring attention, arXiv 2310.01889).
"""

from typing import Protocol

import torch
from torch import Tensor

from agentrl.training.attention.layout import TreeLayout


class NodeKernel(Protocol):
    """Node-wise attention of a device: q [1, H, Q, D], k and v [1, H_kv, T, D]."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [1, H, Q, D] and log-sum-exp [1, H, Q]."""
        ...

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
        """Gradients of q, k and v, given the gradient of the output [1, H, Q, D]."""
        ...


class NodeWiseAttention(torch.autograd.Function):
    """`NodeKernel` as a differentiable function."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TreeLayout,
        scale: float,
        kernel: NodeKernel,
    ) -> Tensor:
        """Output [1, H, Q, D]."""
        out, lse = kernel.forward(q, k, v, layout, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v; None for the other arguments."""
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        layout, scale, kernel = ctx.layout, ctx.scale, ctx.kernel  # type: ignore[attr-defined]
        grads = kernel.backward(grad, *saved, layout, scale)
        return (*grads, None, None, None)
