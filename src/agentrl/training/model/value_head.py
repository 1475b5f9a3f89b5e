"""The critic's model: a causal language model's backbone with a head for one value per token.

The value of a token is that of the state in which it was sampled, computed from the hidden state
that predicts it. `value_loading` loads the weights, `gae` uses the values, `critic` trains them.
"""

import types
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from agentrl.training.attention import SharedLine, SharedPrefix
from agentrl.training.data.batch import MicroBatch
from agentrl.training.model.logprobs import predicting_states

_METHOD = "state_values"
HEADS = ("score", "classifier")  # as transformers' token classifiers name theirs


class _WithValues(Protocol):
    def state_values(self, batch: MicroBatch, prefix: SharedPrefix | None) -> Tensor: ...


def has_value_head(model: PreTrainedModel) -> bool:
    """Whether `model` has a value head, like an `empty_value_model`."""
    return _head(model) is not None


def attach_values(model: PreTrainedModel, line: SharedLine | None = None) -> None:
    """Make `state_values` a forward method of `model`, after `fully_shard`.

    `line`: this process's part of lines under context parallelism, else None.
    """
    setattr(model, _METHOD, types.MethodType(partial(_values, line), model))
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, _METHOD)


def state_values(
    model: PreTrainedModel, batch: MicroBatch, prefix: SharedPrefix | None = None
) -> Tensor:
    """Return the value [M] float32 of the state of each prediction of the batch.

    `prefix`: the shared prefix that the batch follows, if any. `model` must be prepared by
    `prepare_model`.
    """
    return cast(_WithValues, model).state_values(batch, prefix)


def _values(
    line: SharedLine | None, model: PreTrainedModel, batch: MicroBatch, prefix: SharedPrefix | None
) -> Tensor:
    hidden, mine = predicting_states(model, line, batch, prefix)
    head = _head(model)
    assert head is not None, "attached to models with a head only"
    # a copy: FSDP warns of a view, for fear of changes in place
    values: Tensor = head(hidden).squeeze(-1).to(torch.float32, copy=True)
    return (
        values if line is None or mine is None else line.collect(values, mine, len(batch.targets))
    )


def _head(model: PreTrainedModel) -> nn.Module | None:
    heads = (getattr(model, name, None) for name in HEADS)
    return next((head for head in heads if isinstance(head, nn.Module)), None)
