"""The context of the attention layers in a forward pass over a forest.

A forest may follow a shared prefix that an earlier pass has computed. That pass keeps the prefix's
keys and values (`SharedPrefix.keep`). Later passes attend to them as autograd leaves, and the sum
of their gradients is the gradient of the prefix.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.training.attention.layout import TreeLayout


class SharedPrefix:
    """Keys and values [1, H_kv, P, D] of each layer, and hidden states, of a prefix of P tokens."""

    def __init__(self, tokens: int, length: int) -> None:
        """`tokens`: P; `length`: of their line, with padding."""
        self.length = length
        self._tokens = tokens
        self._layers: dict[int, tuple[_Kept, _Kept]] = {}
        self._hidden: _Kept | None = None

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep a layer's keys and values. Later calls, by activation recomputation, are ignored."""
        if layer not in self._layers:
            part = slice(0, self._tokens)
            self._layers[layer] = _Kept(key[:, :, part]), _Kept(value[:, :, part])

    def keep_hidden(self, hidden: Tensor) -> None:
        """Keep the last hidden states [1, T, H] of the pass over the prefix, padding included.

        Under context parallelism these are this process's.
        """
        self._hidden = _Kept(hidden[0])

    @property
    def n_hidden(self) -> int:
        """Number of hidden states that `before_hidden` prepends."""
        assert self._hidden is not None, "the pass over the prefix has not ended"
        return len(self._hidden.leaf)

    def before(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Prepend the prefix's keys and values to those of the forest."""
        prefix_key, prefix_value = self._layers[layer]
        return (
            torch.cat([prefix_key.leaf.to(key.dtype), key], dim=2),
            torch.cat([prefix_value.leaf.to(value.dtype), value], dim=2),
        )

    def before_hidden(self, hidden: Tensor) -> Tensor:
        """Prepend the prefix's hidden states to those of the forest [T, H]."""
        assert self._hidden is not None, "the pass over the prefix has not ended"
        return torch.cat([self._hidden.leaf.to(hidden.dtype), hidden])

    def backward(self) -> None:
        """Run the prefix's backward pass with the gradients of the passes that followed it.

        All tensors take part, with zero gradients if unused, so that the sharded model runs the
        same backward pass on every rank.
        """
        assert self._hidden is not None, "the pass over the prefix has not ended"
        kept = [self._hidden, *(tensor for pair in self._layers.values() for tensor in pair)]
        torch.autograd.backward(
            [tensor.made for tensor in kept], [tensor.gradient() for tensor in kept]
        )


class _Kept:
    """A tensor of the pass over the prefix, and the leaf that represents it in other passes."""

    def __init__(self, made: Tensor) -> None:
        self.made = made
        # At least float32, because it sums the gradients of many passes.
        dtype = torch.promote_types(made.dtype, torch.float32)
        self.leaf = made.detach().to(dtype).requires_grad_(made.requires_grad)

    def gradient(self) -> Tensor:
        grad = torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad
        return grad.to(self.made.dtype)


@dataclass(frozen=True)
class TreeContext:
    """The forest of one forward pass."""

    layout: TreeLayout  # with a prefix: of prefix and forest, with the forest as queries
    n_layers: int  # that call `whole`
    first_read: int = 0  # the first query whose last hidden state is read
    prefix: SharedPrefix | None = None
    is_prefix: bool = False  # whether this is the pass over the prefix
    layers: set[int] = field(default_factory=set)  # layers that have called `whole`

    def whole(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Extend this pass's keys and values to all tokens of the layout."""
        self.layers.add(layer)
        if self.prefix is None:
            return key, value
        if self.is_prefix:
            self.prefix.keep(layer, key, value)
            return key, value
        return self.prefix.before(layer, key, value)

    def first_asking(self, layer: int) -> int:
        """The first query that attends in `layer`.

        Behind the last attention tokens are computed one by one, as on any tree. So what nothing
        reads needs no attention there, only its keys and values.
        """
        return self.first_read if layer == self.n_layers - 1 else 0
