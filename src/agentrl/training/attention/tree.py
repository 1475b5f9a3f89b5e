"""Attention over a forest: the entry that models and context parallelism call.

The kernel depends on device and dtype: on the CPU aten's flash kernel, node by node; on CUDA flash
attention in 16 bits, level by level, and FlexAttention's block masks in float32.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.training.attention.cpu import CpuKernel
from agentrl.training.attention.flash import cuda_flash_kernel
from agentrl.training.attention.flex import flex_tree_attention
from agentrl.training.attention.layout import TreeLayout
from agentrl.training.attention.nodewise import NodeKernel, NodeWiseAttention


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float | None = None
) -> Tensor:
    """Attention of each query of `layout` to the keys that it sees; differentiable.

    q [1, H, layout.n_queries, D], k [1, H_kv, layout.n_tokens, D] and v [1, H_kv, layout.n_tokens,
    D_v], where H_kv divides H. `scale` of the scores is 1 / sqrt(D) if None. Returns [1, H,
    layout.n_queries, D_v]. Raises `ValueError` if the shapes do not fit the layout.
    """
    expected = (layout.n_queries, layout.n_tokens)
    if (q.shape[2], k.shape[2]) != expected:
        raise ValueError(
            f"attention over {q.shape[2]} queries and {k.shape[2]} keys with a layout of "
            f"{expected[0]} and {expected[1]}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width = v.shape[-1]
    q, k, v = same_width(q, k, v)
    if q.device.type != "cpu" and q.dtype not in (torch.bfloat16, torch.float16):
        return flex_tree_attention(q, k, v, layout, scale)[..., :width]
    kernel = _cpu_kernel() if q.device.type == "cpu" else _flash_kernel()
    out: Tensor = NodeWiseAttention.apply(q, k, v, layout, scale, kernel)
    return out[..., :width]


def same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads of different widths with zeros, which change neither scores nor values.

    The kernels take one width. Multi-head latent attention has narrower values than keys.
    """
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


@cache
def _cpu_kernel() -> NodeKernel:
    return CpuKernel()


@cache
def _flash_kernel() -> NodeKernel:
    return cuda_flash_kernel()
