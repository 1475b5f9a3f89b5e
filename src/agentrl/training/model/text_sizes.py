"""The sizes of a model's text part, by whichever names its configuration has for them.

Many configurations have a field of their own, or none where the model has no such part.
"""

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedConfig

_FEED_FORWARD = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")
_OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


@dataclass(frozen=True, slots=True)
class TextSizes:
    """Sizes in units, heads, tokens or experts; the largest where layers differ.

    `heads`, `key_heads`, `head_dim`: 0 without attention. `experts`, `expert`: 0 without experts.
    `feed_forward`: without a field four times `hidden`, as in GPT-2; 0 if there are only experts.
    """

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    key_heads: int
    head_dim: int
    feed_forward: int
    experts: int
    expert: int
    experts_per_token: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Self:
        """The sizes in a model's configuration."""
        text = config.get_text_config()
        heads = _size(text, "num_attention_heads")
        experts = _size(text, *_EXPERTS)
        expert = _size(text, "moe_intermediate_size") if experts else 0
        return cls(
            hidden=text.hidden_size,
            layers=text.num_hidden_layers,
            vocabulary=text.vocab_size,
            heads=heads,
            key_heads=_size(text, "num_key_value_heads") or heads,
            head_dim=(_size(text, "head_dim") or text.hidden_size // heads) if heads else 0,
            feed_forward=_size(text, *_FEED_FORWARD) or (0 if expert else 4 * text.hidden_size),
            experts=experts,
            expert=expert,
            experts_per_token=_size(text, *_OF_A_TOKEN) or 1,
        )


def _size(config: PreTrainedConfig, *names: str) -> int:
    """The first of these fields that says more than 0, in any layer; 0 if none does."""
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    for name in names:
        values = [getattr(layer, name, None) or 0 for layer in layers]
        size = max(max(v) if isinstance(v, list | tuple) else v for v in values)
        if size:
            return int(size)
    return 0
