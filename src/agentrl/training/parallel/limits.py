"""Checks that a model can be divided by the degrees of parallelism. Pure.

`docs/reference/parallelism.md` has the table of what combines with what.
"""

from transformers import PreTrainedConfig, PreTrainedModel

from agentrl.configs import ConfigError
from agentrl.training.attention import why_no_trees
from agentrl.training.model.text_sizes import TextSizes
from agentrl.training.parallel.sizes import ParallelSizes


def check_degrees(model: PreTrainedModel, sizes: ParallelSizes, cp_mode: str) -> None:
    """Raise `ConfigError` if `model`, which may be empty, cannot be divided by `sizes`."""
    text = model.config.get_text_config()
    if sizes.tp > 1:
        _check_tensor(text, sizes.tp)
    if sizes.cp > 1:
        _check_context(model, sizes, cp_mode)
    if sizes.ep > 1:
        _check_experts(text, sizes.ep)


def _check_context(model: PreTrainedModel, sizes: ParallelSizes, cp_mode: str) -> None:
    reason = why_no_trees(model)
    if reason is not None:
        raise ConfigError(
            f"--cp_size {sizes.cp}: context parallelism is made of tree attention, which "
            f"{type(model).__name__} cannot have: {reason}"
        )
    heads = TextSizes.of(model.config).heads // sizes.tp
    if cp_mode == "ulysses" and heads % sizes.cp:
        raise ConfigError(
            f"--cp_size {sizes.cp}: does not divide the {heads} attention heads of a process, "
            "which --cp_mode ulysses needs; take a divisor, or --cp_mode allgather"
        )


def _check_experts(text: PreTrainedConfig, ep: int) -> None:
    experts = TextSizes.of(text).experts
    if not text.base_model_ep_plan or not experts:
        raise ConfigError(f"--ep_size {ep}: {text.model_type} has no plan for spreading experts")
    if experts % ep:
        raise ConfigError(f"--ep_size {ep}: does not divide the model's {experts} experts")


def _check_tensor(text: PreTrainedConfig, tp: int) -> None:
    if not text.base_model_tp_plan:
        raise ConfigError(
            f"--tp_size {tp}: {text.model_type} has no plan for tensor parallelism; use "
            "data or context parallelism instead"
        )
    sizes = TextSizes.of(text)
    for what, size in (
        ("attention heads", sizes.heads),
        ("key and value heads", sizes.key_heads),
        ("tokens in its vocabulary", sizes.vocabulary),
        ("units in a feed-forward layer", sizes.feed_forward),
        ("units in an expert", sizes.expert),
    ):
        if size % tp:
            raise ConfigError(f"--tp_size {tp}: does not divide the model's {size} {what}")
