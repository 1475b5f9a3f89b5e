"""Attention over a forest: the entry that models and context parallelism call."""

from torch import Tensor

from agentrl.training.attention.cpu import CpuKernel
from agentrl.training.attention.layout import TreeLayout
from agentrl.training.attention.nodewise import NodeKernel, NodeWiseAttention


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float | None = None
) -> Tensor:
    """Every query of `layout` over the keys that it sees; differentiable in q, k and v.

    q [1, H, layout.n_queries, D], k and v [1, H_kv, layout.n_tokens, D] with H_kv dividing H.
    `scale` of the scores: 1 / sqrt(D) if not given. Returns [1, H, layout.n_queries, D].
    """
    expected = (layout.n_queries, layout.n_tokens)
    if (q.shape[2], k.shape[2]) != expected:
        raise ValueError(
            f"attention over {q.shape[2]} queries and {k.shape[2]} keys with a layout of "
            f"{expected[0]} and {expected[1]}"
        )
    kernel = _kernel(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return NodeWiseAttention.apply(q, k, v, layout, scale, kernel)  # type: ignore[no-any-return]


def _kernel(q: Tensor) -> NodeKernel:
    """The kernel of the device."""
    if q.device.type == "cpu":
        return CpuKernel()
    raise NotImplementedError(f"no tree attention for {q.device.type}")
