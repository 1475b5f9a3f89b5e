"""Context parallelism: several processes share one line of tokens.

All layers except attention work token by token, so each process computes its part of the line. In
attention the processes exchange data around `tree_attention`, in one of two ways:

    ulysses     all-to-all: each process attends with some of the heads over the whole line, and
                gets the results of all heads for its own tokens (DeepSpeed Ulysses, arXiv
                2309.14509). It sends the least and needs as many heads as processes.
    allgather   all processes get all keys and values and attend for their own tokens (Llama 3,
                arXiv 2407.21783, section 3.3.2). It works with any number of heads.

A line is cut into equal parts, the last one padded. `allgather` cuts it into twice as many parts as
processes; each process has one part from either end, because late tokens see more keys than early
ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad
from transformers import AttentionInterface

from agentrl.training.attention.layout import TreeLayout
from agentrl.training.attention.models import SHARED_IMPLEMENTATION, refuse_extras
from agentrl.training.attention.prefix_keys import TreeContext
from agentrl.training.attention.tree import same_width, tree_attention

# From keys and values of a line to all those that its layout counts (`TreeContext.whole`).
Whole = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class SharedLine(ABC):
    """A context-parallel process's part of a line of T tokens, and its attention."""

    parts_each: int  # number of parts of a line that a process has

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, whole: Whole, scale: float | None
    ) -> Tensor:
        """Attention of this process's tokens over the line, [1, H, own tokens, D].

        `q`, `k`, `v` [1, heads, own tokens, D]; `layout` that of the line without its padding.
        """

    def take(self, line: Tensor) -> Tensor:
        """This process's tokens of `line` [1, T], [1, own tokens]; padding is 0."""
        part = self._part_length(line.shape[1])
        padded = pad(line, (0, part * self._parts - line.shape[1]))
        return torch.cat([padded[:, i * part : (i + 1) * part] for i in self._own], dim=1)

    def mine(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Select the `positions` [M] in a line of `length` tokens that this process has.

        Returns their indices [m] and their positions [m] among this process's tokens.
        """
        part = self._part_length(length)
        which = positions // part
        slots = torch.full((self._parts,), -1, dtype=torch.int64)
        slots[list(self._own)] = torch.arange(self.parts_each)
        slot = slots.to(positions.device)[which]
        indices = torch.nonzero(slot >= 0).squeeze(-1)
        return indices, slot[indices] * part + positions[indices] % part

    def gather(self, own: Tensor) -> Tensor:
        """Gather the padded line [A, T, D] from each process's `own` tokens [A, own, D]."""
        pieces = _gather(own, self._group).unflatten(2, (self.parts_each, -1))
        # [process, A, slot, part, D] to the parts in order
        by_part: Tensor = pieces.movedim(2, 1).flatten(0, 1)[self._places]
        return by_part.movedim(0, 1).flatten(1, 2)

    def collect(self, values: Tensor, indices: Tensor, count: int) -> Tensor:
        """Collect the values [count] of all processes; this one has `values` [m] at `indices`.

        The backward pass gives each process the gradient of its own values. All processes compute
        the same function of the result, which counts once.
        """
        own = values.new_zeros(count).index_copy(0, indices, values)
        total: Tensor = _Sum.apply(own, self._group)
        return total

    @property
    def _parts(self) -> int:
        return self._size * self.parts_each

    @property
    def _own(self) -> tuple[int, ...]:
        """Indices of this process's parts, in order."""
        return self._parts_of(self._rank)

    @property
    def _places(self) -> list[int]:
        """Index of each part of a line in the concatenation of all processes' parts."""
        held = [part for process in range(self._size) for part in self._parts_of(process)]
        return sorted(range(self._parts), key=held.__getitem__)

    def _parts_of(self, process: int) -> tuple[int, ...]:
        return (process, self._parts - 1 - process)[: self.parts_each]

    def _part_length(self, length: int) -> int:
        return -(-length // self._parts)


class Ulysses(SharedLine):
    """Each process attends over the whole line with some of the heads."""

    parts_each = 1

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, whole: Whole, scale: float | None
    ) -> Tensor:
        """See `SharedLine`."""
        # Key heads are repeated so that every process gets the same number.
        copies = self._size // gcd(self._size, k.shape[1])
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        heads = [x.shape[1] // self._size for x in (q, k, v)]
        by_process = torch.cat([x[0].unflatten(0, (self._size, -1)) for x in (q, k, v)], dim=1)
        exchanged = _exchange(by_process, self._group)  # [process, heads, its tokens, D]
        line = exchanged.transpose(0, 1).flatten(1, 2).unsqueeze(0)[:, :, : layout.n_queries]
        q_line, k_line, v_line = line.split(heads, dim=1)
        out = tree_attention(q_line, *whole(k_line, v_line), layout, scale)
        own = q.shape[2]
        out = pad(out, (0, 0, 0, own * self._size - layout.n_queries))
        by_tokens = out[0].unflatten(1, (self._size, own)).transpose(0, 1)
        return _exchange(by_tokens, self._group).flatten(0, 1).unsqueeze(0)


class AllGather(SharedLine):
    """Each process attends for its own tokens with all heads, over all keys and values."""

    parts_each = 2

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, whole: Whole, scale: float | None
    ) -> Tensor:
        """See `SharedLine`."""
        line = self.gather(torch.cat([k[0], v[0]]))[None, :, : layout.n_queries]
        k_line, v_line = whole(*line.chunk(2, dim=1))
        part = q.shape[2] // 2
        start, end = layout.queries
        outs = []
        for i, own in zip(self._own, q.split(part, dim=2), strict=True):
            asking = (min(start + i * part, end), min(start + (i + 1) * part, end))
            count = asking[1] - asking[0]
            if count:
                asked = layout.restrict(*asking)
                out = tree_attention(own[:, :, :count], k_line, v_line, asked, scale)
                outs.append(pad(out, (0, 0, 0, part - count)))
            else:
                # A function of keys and values, whose backward is a collective of all processes.
                outs.append(own * 0 + (k_line.sum() + v_line.sum()) * 0)
        return torch.cat(outs, dim=2)


@torch.compiler.disable  # type: ignore[untyped-decorator] # as `models.attention_forward`
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeContext,
    line: SharedLine,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of one layer, in transformers' interface. The model passes `tree` and `line` on.

    Returns [1, own tokens, H, D]. Raises `ValueError` if the model asks for an unsupported feature.
    """
    refuse_extras(module, attention_mask, dropout, kwargs, tree)
    whole = partial(tree.whole, module.layer_idx)  # type: ignore[arg-type]
    # Of one width, because processes exchange them together.
    scaling, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    query, key, value = same_width(query, key, value)
    out = line.attend(query, key, value, tree.layout, whole, scaling)
    return out[..., :width].transpose(1, 2), None


AttentionInterface.register(SHARED_IMPLEMENTATION, attention_forward)


class _Sum(torch.autograd.Function):
    """The sum over a group. Its backward is the identity: all continue with the same result."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchange(torch.autograd.Function):
    """All-to-all: sends x[i] to process i. It is its own inverse and its own gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None  # type: ignore[attr-defined]


class _Gather(torch.autograd.Function):
    """All-gather of x, [processes, ...]. The backward pass sums each part over all processes."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        size = dist.get_world_size(group)
        gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
        dist.all_gather_single(gathered, x.contiguous(), group=group)
        return gathered.view(size, *x.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        own = torch.empty_like(grad[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_single(own, grad.flatten(0, 1).contiguous(), group=ctx.group)  # type: ignore[attr-defined]
        return own, None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    received: Tensor = _Exchange.apply(x, group)
    return received


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered: Tensor = _Gather.apply(x, group)
    return gathered
