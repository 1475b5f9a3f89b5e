"""A model made ready for training: parallel, and able to give what a step asks of it.

    prepare_model -> token_logprobs, compute_prefix, and of a model with a value head state_values

Not in here: where its weights come from (`loading`, `value_loading`).
"""

from transformers import PreTrainedModel

from agentrl.configs import ComputeConfig
from agentrl.training.attention import use_tree_attention
from agentrl.training.model.logprobs import attach_logprobs
from agentrl.training.model.value_head import attach_values, has_value_head
from agentrl.training.parallel import Mesh, parallelise


def prepare_model(
    model: PreTrainedModel, mesh: Mesh, compute: ComputeConfig, *, trees: bool = True
) -> None:
    """Parallelise `model` in place and attach `token_logprobs`, or `state_values`, to it.

    `trees`: it gets tree attention if it can have it. Raises `ConfigError` if the model cannot be
    divided as asked or does more to its logits than its head does, `RuntimeError` if the sharding
    is not what was asked for.
    """
    if trees:
        use_tree_attention(model)
    line = parallelise(model, mesh, compute)
    attach_logprobs(model, line)
    if has_value_head(model):
        attach_values(model, line)
