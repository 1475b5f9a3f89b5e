"""How far the layers of a model see, by its configuration.

Both `training` and the local engine ask, and do not import each other.
"""

from typing import Any


def sliding_window(config: Any) -> int | None:
    """The sliding window in tokens; None if no layer has one. `config`: transformers', of text."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    return window if getattr(config, "use_sliding_window", True) else None
