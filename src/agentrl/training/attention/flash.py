"""Node-wise attention on CUDA in bfloat16 and float16: aten's flash attention over packed pieces.

One causal call computes all nodes. Inner nodes whose descendants do not overlap share one call
without a mask, so that the number of calls is the depth of the forest and not its number of nodes.
The operators are private to PyTorch, whose version the requirements pin. They are arguments of the
kernel, so that tests can replace them by a definition in plain PyTorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.training.attention.layout import AttentionSpan, TreeLayout

_WIDTH_MULTIPLE = 8  # of a head, in the kernel


@dataclass(frozen=True)
class _Call:
    """Pieces of queries, each of which attends to a piece of keys. Both are packed."""

    queries: slice | Tensor  # into the line's queries: a slice, or indices [n] if there are gaps
    keys: slice | Tensor
    query_ends: Tensor  # [pieces + 1] int32, from 0
    key_ends: Tensor
    longest_query: int
    longest_key: int
    causal: bool


class FlashKernel:
    """A `NodeKernel` over a flash attention with the signatures of aten's operators."""

    def __init__(
        self,
        flash_forward: Callable[..., tuple[Tensor, ...]],
        flash_backward: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        self._flash_forward = flash_forward
        self._flash_backward = flash_backward
        self._calls: WeakKeyDictionary[TreeLayout, list[_Call]] = WeakKeyDictionary()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `NodeKernel`."""
        width = q.shape[-1]
        q, k, v = (_packed(x) for x in (q, k, v))
        total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
        for call in self._of(layout, q.device):
            out, part, *_ = self._flash_forward(
                q[call.queries], k[call.keys], v[call.keys], call.query_ends,
                call.key_ends, call.longest_query, call.longest_key, 0.0, call.causal, False,
                scale=scale,
            )  # fmt: skip
            before = lse[:, call.queries]
            weight = torch.sigmoid(part - before).T.unsqueeze(-1)
            total[call.queries] = total[call.queries].lerp(out.float(), weight)
            lse[:, call.queries] = torch.logaddexp(before, part)
        return _unpacked(total.to(q.dtype), width), lse.unsqueeze(0)

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
        width = q.shape[-1]
        dtype, device = q.dtype, q.device
        grad, q, k, v, out = (_packed(x) for x in (grad, q, k, v, out))
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (q, k, v))
        # Without dropout the random state is never read.
        state = torch.zeros(2, dtype=torch.uint64, device=device)
        unused = torch.zeros((), dtype=torch.uint64, device=device)
        for call in self._of(layout, device):
            gradients = self._flash_backward(
                grad[call.queries], q[call.queries], k[call.keys],
                v[call.keys], out[call.queries],
                lse[0][:, call.queries].contiguous(), call.query_ends, call.key_ends,
                call.longest_query, call.longest_key, 0.0, call.causal, state, unused, scale=scale,
            )  # fmt: skip
            # Indices of one call are distinct.
            dq[call.queries] += gradients[0]
            dk[call.keys] += gradients[1]
            dv[call.keys] += gradients[2]
        return tuple(_unpacked(x.to(dtype), width) for x in (dq, dk, dv))  # type: ignore[return-value]

    def _of(self, layout: TreeLayout, device: torch.device) -> list[_Call]:
        if layout not in self._calls:
            self._calls[layout] = _calls(layout, device)
        return self._calls[layout]


def cuda_flash_kernel() -> FlashKernel:
    """The kernel over aten's operators."""
    aten = torch.ops.aten
    return FlashKernel(
        aten._flash_attention_forward.default, aten._flash_attention_backward.default
    )


def _calls(layout: TreeLayout, device: torch.device) -> list[_Call]:
    first = layout.queries[0]
    nodes = [
        (run.query + index * run.length, run.query + (index + 1) * run.length)
        for run in layout.runs
        for index in range(run.count)
    ]
    keys = [(start + first, end + first) for start, end in nodes]
    calls = [_call(nodes, keys, device, causal=True)]
    levels: list[list[AttentionSpan]] = []
    for span in layout.spans:  # in the order of nodes; each goes to the first level with room
        free = (level for level in levels if level[-1].query_end <= span.query)
        level = next(free, None)
        if level is None:
            level = []
            levels.append(level)
        level.append(span)
    for level in levels:
        calls.append(
            _call(
                [(span.query, span.query_end) for span in level],
                [(span.key, span.key_end) for span in level],
                device,
                causal=False,
            )
        )
    return calls


def _call(
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    causal: bool,
) -> _Call:
    return _Call(
        queries=_where(queries, device),
        keys=_where(keys, device),
        query_ends=_ends(queries, device),
        key_ends=_ends(keys, device),
        longest_query=max(end - start for start, end in queries),
        longest_key=max(end - start for start, end in keys),
        causal=causal,
    )


def _where(pieces: Sequence[tuple[int, int]], device: torch.device) -> slice | Tensor:
    """The indices of all pieces: a slice if they are contiguous."""
    if all(one[1] == other[0] for one, other in pairwise(pieces)):
        return slice(pieces[0][0], pieces[-1][1])
    return torch.cat([torch.arange(start, end) for start, end in pieces]).to(device)


def _ends(pieces: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    lengths = torch.tensor([0, *(end - start for start, end in pieces)], dtype=torch.int32)
    return lengths.cumsum(0, dtype=torch.int32).to(device)


def _packed(x: Tensor) -> Tensor:
    """[1, H, T, D] to [T, H, D], heads as wide as the kernel wants them."""
    line = x[0].transpose(0, 1)
    line = pad(line, (0, -line.shape[-1] % _WIDTH_MULTIPLE))
    return line if line.stride(-1) == 1 else line.contiguous()


def _unpacked(x: Tensor, width: int) -> Tensor:
    return x[..., :width].transpose(0, 1).unsqueeze(0)
