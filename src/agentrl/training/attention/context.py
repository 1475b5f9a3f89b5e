"""What the attention layers of one forward pass must know of the forest in it.

A forest may stand behind a trunk that was computed before: the keys and values of tokens that all
its roots follow. A pass over the trunk keeps them (`Trunk.keep`), passes over parts of the
branches attend to them as leaves, and their gradients, summed over the parts, are the trunk's.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.training.attention.layout import TreeLayout


class Trunk:
    """Keys and values of each layer, [1, H_kv, P, D], of the P tokens before a forest."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Of the pass over the trunk itself. Recomputation in a backward pass changes nothing."""
        if layer not in self._made:
            self._made[layer] = key, value
            # float32: gradients of many branches are summed here
            self._leaves[layer] = _leaf(key), _leaf(value)

    def before(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The trunk's keys and values, then the forest's own."""
        trunk_key, trunk_value = self._leaves[layer]
        return (
            torch.cat([trunk_key.to(key.dtype), key], dim=2),
            torch.cat([trunk_value.to(value.dtype), value], dim=2),
        )

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the pass over the trunk made, and the gradients of it; zeros where none came."""
        made, gradients = [], []
        for layer, pair in self._made.items():
            for tensor, leaf in zip(pair, self._leaves[layer], strict=True):
                made.append(tensor)
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                gradients.append(grad.to(tensor.dtype))
        return made, gradients


@dataclass(frozen=True)
class TreeContext:
    """The forest of one forward pass."""

    layout: TreeLayout  # with a trunk: that of trunk and forest, with the forest as its queries
    trunk: Trunk | None = None
    is_trunk: bool = False  # this pass is the one over the trunk
    layers: set[int] = field(default_factory=set)  # that have asked for `whole`

    def whole(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that the layout counts, given those of the tokens of this pass."""
        self.layers.add(layer)
        if self.trunk is None:
            return key, value
        if self.is_trunk:
            self.trunk.keep(layer, key, value)
            return key, value
        return self.trunk.before(layer, key, value)


def _leaf(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to(dtype).requires_grad_()
