"""Tree attention as an attention implementation of transformers, and the models that support it."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentrl.sliding_window import sliding_window
from agentrl.training.attention.prefix_keys import TreeContext
from agentrl.training.attention.tree import tree_attention

logger = logging.getLogger(__name__)

IMPLEMENTATION = "agentrl_tree"


# Not compiled: layouts differ from call to call.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in transformers' interface. The model passes `tree` on.

    Returns [1, T, H, D]. Without a tree attention is causal. Raises `ValueError` if the model asks
    for an unsupported feature.
    """
    if tree is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    refuse_extras(module, attention_mask, dropout, kwargs, tree)
    key, value = tree.whole(module.layer_idx, key, value)  # type: ignore[arg-type]
    return tree_attention(query, key, value, tree.layout, scaling).transpose(1, 2), None


def refuse_extras(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
    tree: TreeContext,
) -> None:
    """Raise `ValueError` if a layer asks for a feature that tree attention does not support."""
    window = kwargs.get("sliding_window")
    extras = {
        "a mask": attention_mask is not None,
        "dropout": dropout > 0.0,
        "a sliding window": isinstance(window, int) and window < tree.layout.longest_path,
        "sinks": kwargs.get("s_aux") is not None,
        "a soft cap": kwargs.get("softcap") is not None,
        "a position bias": kwargs.get("position_bias") is not None,
    }
    for name, wanted in extras.items():
        if wanted:
            raise ValueError(
                f"{type(module).__name__} asks for {name}, which tree attention does not have: "
                "train this model with --attention_implementation sdpa"
            )


AttentionInterface.register(IMPLEMENTATION, attention_forward)


def use_tree_attention(model: PreTrainedModel) -> None:
    """Switch `model` to tree attention if it supports it; otherwise log the reason."""
    reason = why_no_trees(model)
    if reason is None:
        model.set_attn_implementation(IMPLEMENTATION)
    else:
        logger.warning(
            "%s trains padded sequences, in which shared prefixes are computed again: %s",
            type(model).__name__, reason,
        )  # fmt: skip


def has_tree_attention(model: PreTrainedModel) -> bool:
    """Whether `model` uses tree attention, shared lines included."""
    return str(model.config._attn_implementation).startswith(IMPLEMENTATION)


def why_no_trees(model: PreTrainedModel) -> str | None:
    """Why `model` does not support tree attention; None if it does."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of {', '.join(others)}"
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        return "its attention is not exchangeable (AttentionInterface)"
    window, longest = sliding_window(config), getattr(config, "max_position_embeddings", None)
    if window is not None and (longest is None or window < longest):
        return f"its layers see {window} tokens at most"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it caps its attention scores"
    if any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in model.named_parameters()):
        return "its attention has sinks"
    return None
