"""The names and pieces of a model's weights in its folder: one conversion, in both directions.

In memory the experts of a mixture are one tensor, and the text part of a multimodal model has other
names than in the folder. transformers has a table of this for each model. The trainer loads,
publishes and exports by it, and the local engine takes weights by it; they do not import each
other.
"""

from collections.abc import Collection, Mapping

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


class WeightNames:
    """The names of one model's weights, in the model and in its folder."""

    def __init__(
        self, model: PreTrainedModel, weights: Collection[str], stored: Collection[str] = ()
    ) -> None:
        """`weights`: names in the model, without an adapter's. `stored`: names in its folder.

        Weights are written as `stored` has them. If it is empty, they are written as transformers
        writes a model that was not loaded.
        """
        self._model = model
        self._weights = dict.fromkeys(weights, True)
        table = _table(model)
        self._renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        places = {name: self.place(name)[0] for name in sorted(stored, key=dot_natural_key)}
        self.places = {name: place for name, place in places.items() if place in self._weights}
        """The weight of the model that each tensor of the folder belongs to, in natural order."""
        self.beside = [name for name in places if name not in self.places]
        """The tensors of the folder that belong to no weight of the model."""
        self._used: list[WeightTransform] | None = None
        if stored:
            self._used = [entry for entry in table if entry.was_used()]

    def place(self, name: str) -> tuple[str, str | None]:
        """The weight that a tensor of the folder belongs to, and the pattern that it matched.

        The pattern is one of the `converter`; None if the tensor is the whole weight.
        """
        return rename_source_key(
            name, self._renamings, self._converters, self._model.base_model_prefix, self._weights
        )

    def converter(self, pattern: str) -> WeightConverter:
        """The conversion that makes a weight from tensors that match `pattern`."""
        return next(entry for entry in self._converters if pattern in entry.source_patterns)

    def to_folder(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of the model, by names and in pieces of the folder.

        The weights of a layer must come together. Some results are views of `weights`.
        """
        # transformers' loader leaves what it used there; a model that is made empty has nothing.
        setattr(self._model, "_weight_conversions", self._used)  # noqa: B010
        return revert_weight_conversion(self._model, dict(weights))  # type: ignore[no-any-return]


def _table(model: PreTrainedModel) -> list[WeightTransform]:
    """transformers' conversions of a model, which may be sharded."""
    made = type(model)
    # FSDP gives a sharded model a class of its own, which transformers has no conversions for.
    model.__class__ = next(
        kind for kind in made.__mro__ if not kind.__module__.startswith("torch.")
    )
    try:
        return get_model_conversion_mapping(model)
    finally:
        model.__class__ = made
