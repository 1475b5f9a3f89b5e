"""Makes weights of the served model from tensors as its folder has them, in any order.

The experts of a layer are one tensor in the model and many in the folder. Pieces may come in
several requests; a weight is made once it has all of them.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from agentrl.weight_names import WeightNames


class WeightsError(ValueError):
    """Weights are not those of the served model."""


class WeightAssembly:
    """Collects the tensors of one update. That of the model has none; `begin` makes others."""

    def __init__(self, model: PreTrainedModel, beside: Collection[str]) -> None:
        """`beside`: tensors that may come though the model has none of them; they are left out."""
        self._model = model
        self._beside = frozenset(beside)
        # Without values: the model's may be released.
        self._empty = {
            name: torch.empty_like(tensor, device="meta")
            for name, tensor in model.state_dict().items()
        }
        self._names = WeightNames(model, self._empty)
        untied = {
            name: tensor
            for name, tensor in self._empty.items()
            if name not in model.all_tied_weights_keys
        }
        places = (self._names.place(name) for name in self._names.to_folder(untied))
        self._counts = Counter(weight for weight, pattern in places if pattern is not None)
        self._pieces: defaultdict[str, dict[str, tuple[str, Tensor]]] = defaultdict(dict)

    def begin(self) -> Self:
        """An assembly of the same model for one update; no two updates share pieces."""
        begun = copy.copy(self)
        begun._pieces = defaultdict(dict)
        return begun

    def add(self, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
        """Return the weights that are complete with `tensors`, by their names in the model.

        Raises WeightsError for the first tensor whose name, shape or dtype does not fit the model.
        `source`: where they come from, for the message.
        """
        complete: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if key in self._beside:
                continue
            if not tensor.is_floating_point():
                raise WeightsError(f"{source}: {key} is {tensor.dtype}, not floating point")
            weight, pattern = self._names.place(key)
            if weight not in self._empty:
                raise WeightsError(f"{source} has {key!r}, which the served model has not")
            if pattern is None:
                complete[weight] = tensor
                continue
            pieces = self._pieces[weight]
            pieces[key] = (pattern, tensor)
            if len(pieces) == self._counts[weight]:
                complete |= self._join(weight, self._pieces.pop(weight), source)
        for weight, tensor in complete.items():
            shape = self._empty[weight].shape
            if tensor.shape != shape:
                raise WeightsError(
                    f"{source}: {weight} has shape {list(tensor.shape)},"
                    f" the served model's is {list(shape)}"
                )
        return complete

    def end(self) -> None:
        """Raise WeightsError if a weight lacks pieces."""
        for weight, pieces in self._pieces.items():
            raise WeightsError(f"{weight} has {len(pieces)} of its {self._counts[weight]} pieces")

    def _join(
        self, weight: str, pieces: Mapping[str, tuple[str, Tensor]], source: str
    ) -> dict[str, Tensor]:
        """The weight that the pieces make up, and any other that is made with it."""
        pattern = next(iter(pieces.values()))[0]
        converter = copy.deepcopy(self._names.converter(pattern))
        for key in sorted(pieces, key=dot_natural_key):
            matched, tensor = pieces[key]
            converter.add_tensor(weight, key, matched, tensor)  # type: ignore[arg-type]
        try:
            made = converter.convert(weight, model=self._model, config=self._model.config)
        except RuntimeError as error:
            raise WeightsError(f"{source}: {weight} cannot be made: {error}") from error
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
