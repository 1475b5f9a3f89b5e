"""What the attention layers of one forward pass must know of the forest in it.

A forest may stand behind a shared prefix that was computed before: the keys and values of tokens
that all its roots follow. A pass over the prefix keeps them (`SharedPrefix.keep`). The passes over
what follows it attend to them as leaves, and the sum of their gradients is the prefix's.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.training.attention.layout import TreeLayout


class SharedPrefix:
    """Keys and values of each layer, [1, H_kv, P, D], and the hidden states, of P tokens."""

    def __init__(self, tokens: int, length: int) -> None:
        """`tokens`: P; `length`: of their line, with padding."""
        self.length = length
        self._tokens = tokens
        self._layers: dict[int, tuple[_Kept, _Kept]] = {}
        self._hidden: _Kept | None = None

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep a layer's keys and values of the prefix's own pass, but not a recomputation's."""
        if layer not in self._layers:
            part = slice(0, self._tokens)
            self._layers[layer] = _Kept(key[:, :, part]), _Kept(value[:, :, part])

    def keep_hidden(self, hidden: Tensor) -> None:
        """The last hidden states [1, T, H] of the pass over the prefix, or this process's of them.

        They may be those of padding too, which nobody asks for.
        """
        self._hidden = _Kept(hidden[0])

    @property
    def n_hidden(self) -> int:
        """How many hidden states `before_hidden` puts before others."""
        assert self._hidden is not None, "the pass over the prefix has not ended"
        return len(self._hidden.leaf)

    def before(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix's keys and values, then the forest's own."""
        prefix_key, prefix_value = self._layers[layer]
        return (
            torch.cat([prefix_key.leaf.to(key.dtype), key], dim=2),
            torch.cat([prefix_value.leaf.to(value.dtype), value], dim=2),
        )

    def before_hidden(self, hidden: Tensor) -> Tensor:
        """The prefix's hidden states, then those of the forest [T, H]."""
        assert self._hidden is not None, "the pass over the prefix has not ended"
        return torch.cat([self._hidden.leaf.to(hidden.dtype), hidden])

    def backward(self) -> None:
        """The backward pass of the prefix, from the gradients that the passes behind it left.

        Everything takes part, with zeros if nothing was asked, so that the sharded model sees the
        same gradients come on every rank.
        """
        assert self._hidden is not None, "the pass over the prefix has not ended"
        kept = [self._hidden, *(tensor for pair in self._layers.values() for tensor in pair)]
        torch.autograd.backward(
            [tensor.made for tensor in kept], [tensor.gradient() for tensor in kept]
        )


class _Kept:
    """A tensor of the pass over the prefix, and the leaf that stands for it in other passes."""

    def __init__(self, made: Tensor) -> None:
        self.made = made
        # gradients of many passes are summed in it, hence float32 at least
        dtype = torch.promote_types(made.dtype, torch.float32)
        self.leaf = made.detach().to(dtype).requires_grad_(made.requires_grad)

    def gradient(self) -> Tensor:
        grad = torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad
        return grad.to(self.made.dtype)


@dataclass(frozen=True)
class TreeContext:
    """The forest of one forward pass."""

    layout: TreeLayout  # with a prefix: that of prefix and forest, with the forest as its queries
    prefix: SharedPrefix | None = None
    is_prefix: bool = False  # this pass is the one over the prefix
    layers: set[int] = field(default_factory=set)  # that have asked for `whole`

    def whole(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that the layout counts, given those of the tokens of this pass."""
        self.layers.add(layer)
        if self.prefix is None:
            return key, value
        if self.is_prefix:
            self.prefix.keep(layer, key, value)
            return key, value
        return self.prefix.before(layer, key, value)
