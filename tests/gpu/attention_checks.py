"""Each kernel of tree attention against the definition, a dense mask in float64.

On CUDA bfloat16 and float16 are the flash kernel and float32 is FlexAttention; the stand-in is the
kernel of the CPU in the same dtypes. Every forest is tried with every shape of heads, and all that
are wrong are named.
"""

import time

import torch
from machine import Figures, Machine, require
from on_device import device_of, synchronise
from torch import Tensor

from agentrl.training.attention import TreeLayout, tree_attention

# A kernel may be this many times as far from the definition as a dense mask in its own dtype, or
# this far, relative to the largest entry: sums in another order.
_TIMES_PLAIN = 3.0
_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}

# Query heads, key heads, width of keys, width of values: Qwen3's, Qwen2.5-0.5B's, heads of an
# uneven width, and multi-head latent attention.
_HEADS = ((16, 8, 128, 128), (14, 2, 64, 64), (6, 6, 96, 96), (4, 4, 192, 128))


def bfloat16(machine: Machine, figures: Figures) -> None:
    """Output and gradients of all forests in bfloat16."""
    _compare(machine, figures, torch.bfloat16)


def float16(machine: Machine, figures: Figures) -> None:
    """The same in float16."""
    _compare(machine, figures, torch.float16)


def float32(machine: Machine, figures: Figures) -> None:
    """The same in float32."""
    _compare(machine, figures, torch.float32)


def forests(unit: int) -> dict[str, TreeLayout]:
    """The shapes of micro-batches, of some 15 units of tokens each."""
    siblings = TreeLayout([-1, *[0] * 6], [6 * unit, *[unit + 3] * 6])
    return {
        "one sequence": TreeLayout([-1], [15 * unit + 1]),
        "packed sequences": TreeLayout([-1] * 4, [unit, 5 * unit, 5 * unit, 4 * unit + 5]),
        "siblings": siblings,
        "siblings after their prefix": siblings.restrict(6 * unit, siblings.n_tokens),
        "a slice of the queries": siblings.restrict(2 * unit + 1, 9 * unit),
        "a branching record": TreeLayout(
            [-1, 0, 1, 2, 1, 0, -1, 6, 6], [3 * unit, 2 * unit, unit, 1, 7, unit, unit, 1, 2 * unit]
        ),
        "single tokens": TreeLayout([-1, 0, 1, 2, 2, 0, 0, -1], [1] * 8),
    }


def dense_mask(layout: TreeLayout, device: torch.device) -> Tensor:
    """Which query sees which key, from the nodes' parents alone, bool [queries, tokens]."""
    nodes = len(layout.parents)
    above = torch.eye(nodes, dtype=torch.bool)  # [node, itself or an ancestor]
    for node, parent in enumerate(layout.parents):
        if parent >= 0:
            above[node] |= above[parent]
    node_of = torch.repeat_interleave(torch.arange(nodes), torch.tensor(layout.lengths))
    token = torch.arange(layout.n_tokens)
    mask = above[node_of][:, node_of] & (token <= token[:, None])
    return mask[slice(*layout.queries)].to(device)


def by_definition(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout) -> Tensor:
    """`tree_attention` with a dense mask, in the dtype of its inputs."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = ~dense_mask(layout, q.device)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def _compare(machine: Machine, figures: Figures, dtype: torch.dtype) -> None:
    wrong: list[str] = []
    worst = plain = 0.0
    # Large enough for several blocks of a kernel, small enough for a dense mask in float64.
    for name, layout in forests(128 if machine.on_gpu else 9).items():
        for heads in _HEADS:
            where = f"{name} with heads {heads}"
            try:
                found, allowed = _errors(layout, heads, dtype, device_of(machine))
            except (RuntimeError, ValueError) as error:  # not supported, no memory, ...
                wrong.append(f"{where}: {str(error).strip().splitlines()[0]}")
                continue
            worst, plain = max(worst, *found), max(plain, *allowed)
            wrong += [
                f"{where}: {part} is wrong by {ours:.2g} of its largest entry"
                for part, ours, theirs in zip(("output", "dq", "dk", "dv"), found, allowed,
                                              strict=True)
                if not ours <= max(_TIMES_PLAIN * theirs, _ROUNDING[dtype])
            ]  # fmt: skip
    figures.add(worst_error=worst, error_of_a_dense_mask=plain)
    milliseconds, tokens = _speed(machine, dtype)
    figures.add(ms=round(milliseconds, 2), tokens=tokens)
    require(not wrong, "; ".join(wrong))


def _errors(
    layout: TreeLayout, heads: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[list[float], list[float]]:
    """Errors of output, dq, dk and dv relative to the largest entry: ours, and a dense mask's."""
    generator = torch.Generator().manual_seed(layout.n_tokens)
    query_heads, key_heads, width, value_width = heads
    q, k, v, weights = (
        # The heads of a token side by side, as a model makes them.
        torch.randn(1, tokens, count, size, generator=generator).to(device, dtype).transpose(1, 2)
        for count, tokens, size in (
            (query_heads, layout.n_queries, width),
            (key_heads, layout.n_tokens, width),
            (key_heads, layout.n_tokens, value_width),
            (query_heads, layout.n_queries, value_width),
        )
    )

    def results(function, *inputs: Tensor) -> list[Tensor]:
        inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        out = function(*inputs, layout)
        gradients = torch.autograd.grad(out, inputs, weights.to(out.dtype))
        return [tensor.double() for tensor in (out.detach(), *gradients)]

    exact = results(by_definition, q.double(), k.double(), v.double())

    def errors(approximate: list[Tensor]) -> list[float]:
        return [
            float((one - other).abs().max() / other.abs().max().clamp_min(1e-9))
            for one, other in zip(approximate, exact, strict=True)
        ]

    return errors(results(tree_attention, q, k, v)), errors(results(by_definition, q, k, v))


def _speed(machine: Machine, dtype: torch.dtype) -> tuple[float, int]:
    """Milliseconds of a layer of Qwen3-0.6B, forward and backward, over siblings; their tokens."""
    unit = 1024 if machine.on_gpu else 16
    layout = TreeLayout([-1, *[0] * 8], [8 * unit, *[unit] * 8])
    q, k, v = (
        torch.randn(1, layout.n_tokens, heads, 128, device=device_of(machine), dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (16, 8, 8)
    )

    def step() -> float:
        synchronise(machine)
        began = time.perf_counter()
        tree_attention(q, k, v, layout).sum().backward()
        synchronise(machine)
        return time.perf_counter() - began

    return 1000 * min(step() for _ in range(4)), layout.n_tokens
