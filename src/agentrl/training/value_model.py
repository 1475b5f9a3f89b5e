"""The critic's model: a causal language model's backbone with a head that gives one value a token.

A value is that of the state in which a token was sampled, and so is read from the hidden state
that predicts the token. Not in here: what values are good for (`gae`), and their training
(`critic`).
"""

import types
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import AutoModelForTokenClassification, PreTrainedModel

from agentrl.configs import ConfigError, ModelConfig
from agentrl.training.attention import SharedLine, Trunk
from agentrl.training.batch import MicroBatch
from agentrl.training.logprobs import predicting_states
from agentrl.training.model_folder import check_model_folder, first_attention

FLAG = "--critic_model_name_or_path"
_METHOD = "state_values"
_HEADS = ("score", "classifier")  # as transformers' token classifiers name them


class _WithValues(Protocol):
    def state_values(self, batch: MicroBatch, trunk: Trunk | None) -> Tensor: ...


def load_value_model(config: ModelConfig) -> PreTrainedModel:
    """The folder's model as a token classifier of one label, in float32 on the CPU.

    A folder of a language model has no such head: it then starts as 0, on every rank alike, so that
    the first values are 0 and the first step's advantages are those without a critic. A folder that
    a critic was saved to keeps its own. Raises `ConfigError`.
    """
    folder = check_model_folder(config.model_name_or_path, FLAG)
    try:
        model, loaded = AutoModelForTokenClassification.from_pretrained(
            folder,
            num_labels=1,
            dtype=torch.float32,
            attn_implementation=first_attention(config),
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{FLAG} {folder}: the critic cannot be loaded ({reason})") from None
    missing = set(loaded["missing_keys"])
    if others := sorted(name for name in missing if name.split(".")[0] not in _HEADS):
        raise ConfigError(f"{FLAG} {folder}: the folder has no weights for {others[0]}")
    head = _head(model)
    if head is None:
        raise ConfigError(
            f"{FLAG} {folder}: {type(model).__name__} has no head of a known name "
            f"({', '.join(_HEADS)}), so it cannot be a critic: give another model"
        )
    if missing:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
    return cast(PreTrainedModel, model)


def has_value_head(model: PreTrainedModel) -> bool:
    """Whether `model` is from `load_value_model`."""
    return _head(model) is not None


def attach_values(model: PreTrainedModel, line: SharedLine | None = None) -> None:
    """Make `state_values` a forward method of `model`; after `fully_shard`.

    `line`: how processes share lines, if they do.
    """
    setattr(model, _METHOD, types.MethodType(partial(_values, line), model))
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, _METHOD)


def state_values(model: PreTrainedModel, batch: MicroBatch, trunk: Trunk | None = None) -> Tensor:
    """The value [M] float32 of the state that each of the batch's predictions is made in.

    `trunk`: what the batch stands behind, if it does. `model` must have been through `parallelise`.
    """
    return cast(_WithValues, model).state_values(batch, trunk)


def _values(
    line: SharedLine | None, model: PreTrainedModel, batch: MicroBatch, trunk: Trunk | None
) -> Tensor:
    hidden, mine = predicting_states(model, line, batch, trunk)
    head = _head(model)
    assert head is not None, "attached to models with a head only"
    # a copy: FSDP warns of a view, for fear of changes in place
    values: Tensor = head(hidden).squeeze(-1).to(torch.float32, copy=True)
    return (
        values if line is None or mine is None else line.collect(values, mine, len(batch.targets))
    )


def _head(model: PreTrainedModel) -> nn.Module | None:
    heads = (getattr(model, name, None) for name in _HEADS)
    return next((head for head in heads if isinstance(head, nn.Module)), None)
