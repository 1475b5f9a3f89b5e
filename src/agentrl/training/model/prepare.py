"""Prepares a model for training: parallelism, tree attention, and the methods that a step calls.

    prepare_model -> token_logprobs, compute_prefix, and state_values with a value head

`loading` and `value_loading` load the weights.
"""

import logging

from transformers import PreTrainedModel

from agentrl.configs import ComputeConfig
from agentrl.training.attention import use_tree_attention
from agentrl.training.model.logprobs import attach_logprobs
from agentrl.training.model.noise import remove_noise
from agentrl.training.model.value_head import attach_values, has_value_head
from agentrl.training.parallel import Mesh, parallelise

logger = logging.getLogger(__name__)


def prepare_model(
    model: PreTrainedModel, mesh: Mesh, compute: ComputeConfig, *, trees: bool = True
) -> None:
    """Parallelise `model` in place, and attach `token_logprobs` and, with a head, `state_values`.

    The model and its configuration lose their dropout. `trees`: use tree attention if the model
    lets its attention be exchanged; whether it is right, `step.probe` finds out. Raises
    `ConfigError` if the model cannot be divided by the mesh, and `RuntimeError` if a parameter is
    not sharded as expected.
    """
    if noise := remove_noise(model):
        logger.info("%s is trained with no %s", type(model).__name__, ", ".join(noise))
    if trees:
        use_tree_attention(model)
    line = parallelise(model, mesh, compute)
    attach_logprobs(model, line, fp32_head=compute.fp32_head)
    if has_value_head(model):
        attach_values(model, line)
