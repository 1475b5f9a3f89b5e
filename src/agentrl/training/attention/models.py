"""Tree attention as an attention implementation of transformers, and the models that support it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentrl.training.attention.prefix_keys import TreeContext
from agentrl.training.attention.tree import tree_attention

IMPLEMENTATION = "agentrl_tree"
SHARED_IMPLEMENTATION = f"{IMPLEMENTATION}_shared"  # of context parallelism, in `shared`
_TENSORS = {"s_aux": "sinks", "position_bias": "a position bias"}  # by their names in transformers


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
    layer: int = module.layer_idx  # type: ignore[assignment]
    key, value = tree.whole(layer, key, value)
    first = tree.first_asking(layer)
    if not first:
        return tree_attention(query, key, value, tree.layout, scaling).transpose(1, 2), None
    start, end = tree.layout.queries
    asking = tree.layout.restrict(start + first, end)
    out = tree_attention(query[:, :, first:], key, value, asking, scaling).transpose(1, 2)
    return pad(out, (0, 0, 0, 0, first, 0)), None


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
        "a soft cap": kwargs.get("softcap") is not None,
    }
    # A tensor changes what is attended to, also one that no model has today.
    given = (name for name, value in kwargs.items() if isinstance(value, Tensor))
    extras |= {_TENSORS.get(name, name): True for name in given if name != "position_ids"}
    for name, wanted in extras.items():
        if wanted:
            raise ValueError(
                f"{type(module).__name__} asks for {name}, which tree attention does not have"
            )


AttentionInterface.register(IMPLEMENTATION, attention_forward)


def use_tree_attention(model: PreTrainedModel) -> None:
    """Switch `model` to tree attention if its attention can be exchanged."""
    if why_no_trees(model) is None:
        model.set_attn_implementation(IMPLEMENTATION)


def has_tree_attention(model: PreTrainedModel) -> bool:
    """Whether `model` uses tree attention, shared lines included."""
    return str(model.config._attn_implementation).startswith(IMPLEMENTATION)


def why_no_trees(model: PreTrainedModel) -> str | None:
    """Why `model` cannot use tree attention at all; None if it can be tried.

    What its layers ask for is seen when they run (`refuse_extras`, `recorded_windows`).
    """
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        return "its attention is not exchangeable (AttentionInterface)"
    return None


def line_limit(model: PreTrainedModel) -> int | None:
    """The most tokens of a line for which attention is the same wherever in it a row stands.

    Llama 4 scales queries by their place in the line, not in the row, from `floor_scale` tokens on.
    None: a line may be of any length.
    """
    text = model.config.get_text_config()
    if getattr(text, "attn_temperature_tuning", False) and hasattr(text, "floor_scale"):
        return int(text.floor_scale) - 1
    return None


@contextmanager
def recorded_windows() -> Iterator[set[int]]:
    """Collect how many tokens the layers of models with tree attention may see, in the block.

    A model asks transformers for the masks of sliding windows and chunks. Tree attention has no
    masks, so the model is given none and the request is recorded.
    """
    windows: set[int] = set()

    def record(*args: object, local_size: int | None = None, **kwargs: object) -> None:
        if local_size is not None:
            windows.add(local_size)

    names = (IMPLEMENTATION, SHARED_IMPLEMENTATION)
    for name in names:
        AttentionMaskInterface.register(name, record)
    try:
        yield windows
    finally:
        for name in names:
            del AttentionMaskInterface._global_mapping[name]
