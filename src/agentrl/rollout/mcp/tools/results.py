"""A tool's result: the text that the model reads, and what is kept of it beside that."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a call gave.

    `text`: what the model reads. `whole`: the whole text, where `text` is cut. `kept`: the `_id` in
    the collection `tool_results` of what is not in `text` (the whole text, images, files), or None
    if `text` is all there is.
    """

    text: str
    is_error: bool
    latency_s: float
    whole: str | None = None
    kept: str | None = None
