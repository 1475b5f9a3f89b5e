"""Attention over a forest: the entry that models and context parallelism call.

The kernel depends on device and dtype: on the CPU aten's flash kernel, node by node; on CUDA flash
attention in 16 bits, level by level, and FlexAttention's block masks in float32.
"""

from functools import cache

import torch
from torch import Tensor

from agentrl.training.attention.cpu import CpuKernel
from agentrl.training.attention.flash import cuda_flash_kernel
from agentrl.training.attention.flex import flex_tree_attention
from agentrl.training.attention.layout import TreeLayout
from agentrl.training.attention.nodewise import NodeKernel, NodeWiseAttention


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float | None = None
) -> Tensor:
    """Attention of each query of `layout` to the keys that it sees; differentiable.

    q [1, H, layout.n_queries, D]; k and v [1, H_kv, layout.n_tokens, D], where H_kv divides H.
    `scale` of the scores is 1 / sqrt(D) if None. Returns [1, H, layout.n_queries, D]. Raises
    `ValueError` if the shapes do not fit the layout.
    """
    expected = (layout.n_queries, layout.n_tokens)
    if (q.shape[2], k.shape[2]) != expected:
        raise ValueError(
            f"attention over {q.shape[2]} queries and {k.shape[2]} keys with a layout of "
            f"{expected[0]} and {expected[1]}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.device.type != "cpu" and q.dtype not in (torch.bfloat16, torch.float16):
        return flex_tree_attention(q, k, v, layout, scale)
    kernel = _cpu_kernel() if q.device.type == "cpu" else _flash_kernel()
    out: Tensor = NodeWiseAttention.apply(q, k, v, layout, scale, kernel)
    return out


@cache
def _cpu_kernel() -> NodeKernel:
    return CpuKernel()


@cache
def _flash_kernel() -> NodeKernel:
    return cuda_flash_kernel()
