"""The logits of given hidden states, as the model itself computes them.

A model may scale its hidden states before the output head, or scale, cap and transform the logits
after it. Each architecture does so in its own forward method. That method therefore runs here too,
with a base model that answers with the given hidden states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class _HiddenStates(tuple[Tensor]):
    """The output of a base model that has nothing but its last hidden states."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class OwnHead(nn.Module):
    """All of a model that follows its base model: from hidden states to the model's own logits.

    Call it in a forward method of the model only. Its parameters are the model's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        base = base_model(model)
        self._model = (model,)  # in a tuple: the model is no part of its head
        self.parts = nn.ModuleList(part for part in model.children() if part is not base)

    @property
    def weight(self) -> Tensor | None:
        """The weight of the output embeddings; a slice of it under tensor parallelism."""
        (model,) = self._model
        weight: Tensor | None = getattr(model.get_output_embeddings(), "weight", None)
        return weight

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """The logits [N, V]; under tensor parallelism a slice of the vocabulary.

        Raises `ValueError` if the model is not built so.
        """
        (model,) = self._model
        ids = hidden_NH.new_zeros((1, len(hidden_NH)), dtype=torch.int64)
        with _answering(model, hidden_NH[None]):
            # Not called as a module: the hooks of the root have run around the caller.
            logits = model.forward(input_ids=ids, use_cache=False).logits
        if not isinstance(logits, Tensor):
            raise ValueError("its head does not compute logits from given hidden states")
        return logits.squeeze(0)  # an index would copy the gradient


def base_model(model: PreTrainedModel) -> nn.Module:
    """The module from tokens to hidden states."""
    base: nn.Module = model.base_model
    if base is not model:
        return base
    # transformers gives the model itself if its base model has another name than its family's.
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), base)


@contextmanager
def _answering(model: PreTrainedModel, hidden: Tensor) -> Iterator[None]:
    """Let the base model and its decoder answer with `hidden` [1, N, H] in the block."""

    def forward(*args: Any, **kwargs: Any) -> _HiddenStates:
        return _HiddenStates((hidden,))

    # Some models call the decoder of their base model. Of others the model itself is the decoder.
    bases = [part for part in {base_model(model), model.get_decoder()} if part is not model]
    before = [vars(base).get("forward") for base in bases]
    for base in bases:
        vars(base)["forward"] = forward
    try:
        yield
    finally:
        for base, own in zip(bases, before, strict=True):
            if own is None:
                del vars(base)["forward"]
            else:
                vars(base)["forward"] = own
