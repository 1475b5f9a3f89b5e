"""Which models can be divided by which degrees; what cannot is refused with the reason. Pure.

`docs/parallelism.md` has the table of what combines with what.
"""

from transformers import PreTrainedConfig

from agentrl.configs import ConfigError
from agentrl.training.parallel.sizes import ParallelSizes


def check_model(config: PreTrainedConfig, sizes: ParallelSizes, cp_mode: str) -> None:
    """Raises `ConfigError` if a model of `config` cannot be divided by `sizes`."""
    text = config.get_text_config()
    if sizes.tp > 1:
        _check_tensor(text, sizes.tp)
    if sizes.cp > 1 and cp_mode == "ulysses":
        heads = text.num_attention_heads // sizes.tp
        if heads % sizes.cp:
            raise ConfigError(
                f"--cp_size {sizes.cp}: the model has {heads} attention heads on each process, "
                "which --cp_mode ulysses divides over them; take a divisor, or --cp_mode allgather"
            )
    if sizes.ep > 1:
        experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
        if not text.base_model_ep_plan or experts is None:
            raise ConfigError(
                f"--ep_size {sizes.ep}: {text.model_type} has no plan for spreading experts"
            )
        if experts % sizes.ep:
            raise ConfigError(
                f"--ep_size {sizes.ep}: does not divide the model's {experts} experts"
            )


def _check_tensor(text: PreTrainedConfig, tp: int) -> None:
    if not text.base_model_tp_plan:
        raise ConfigError(
            f"--tp_size {tp}: {text.model_type} has no plan for tensor parallelism; use "
            "data or context parallelism instead"
        )
    for what, size in (
        ("attention heads", text.num_attention_heads),
        ("key and value heads", text.num_key_value_heads),
        ("tokens in its vocabulary", text.vocab_size),
        ("units in a feed-forward layer", text.intermediate_size),
    ):
        if size % tp:
            raise ConfigError(f"--tp_size {tp}: does not divide the model's {size} {what}")
