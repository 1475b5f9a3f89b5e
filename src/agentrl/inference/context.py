"""How long a prompt and its answer may be together: a model's own length, a service's context.

Pure, but for the reading of a model folder's config.json.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.inference.protocol import GenerateRequest, ModelLimits, PromptTooLong, RequestRejected

# Of the context, SGLang keeps two positions for itself, and it refuses a prompt that leaves fewer
# than five for the output. The longest prompt that `/server_info` tells is the first refused one.
_KEPT_POSITIONS = 2
_LEAST_ROOM = 5
BEYOND_PROMPT = _KEPT_POSITIONS + _LEAST_ROOM - 1

# How services refuse what is too long, SGLang (its router, the local engine) and others:
#   The input (2000 tokens) is longer than the model's context length (1024 tokens).
#   Requested token count exceeds the model's maximum context length of 1024 tokens. …
#   Input length (2000 tokens) exceeds the maximum allowed length (1018 tokens). …
_TOO_LONG = re.compile(r"(context length|maximum allowed length)(?: of| is)? \(?(\d+) tokens")


def longest_prompt(context_length: int) -> int:
    """Tokens of the longest prompt that a service with this context answers."""
    return context_length - BEYOND_PROMPT - 1


def fit_request(request: GenerateRequest, limits: ModelLimits) -> GenerateRequest:
    """The request, its `max_new_tokens` cut to what the context leaves.

    Raises RequestRejected for an empty prompt and a token id outside the vocabulary (which kills an
    SGLang server), PromptTooLong for a prompt that leaves no room for an answer.
    """
    if not request.input_ids:
        raise RequestRejected(f"request {request.rid}: the prompt is empty")
    if min(request.input_ids) < 0 or (
        limits.vocab_size is not None and max(request.input_ids) >= limits.vocab_size
    ):
        raise RequestRejected(
            f"request {request.rid}: prompt ids run from {min(request.input_ids)} to"
            f" {max(request.input_ids)} but the model's vocabulary is {limits.vocab_size} ids"
            " from 0: was it tokenised with another model's tokenizer?"
        )
    if limits.context_length is None:
        return request
    if len(request.input_ids) > longest_prompt(limits.context_length):
        raise PromptTooLong(
            f"request {request.rid}: the prompt of {len(request.input_ids)} tokens leaves no room"
            f" in the service's context of {limits.context_length}: shorten it, or start the"
            " service with a longer context"
        )
    room = limits.context_length - _KEPT_POSITIONS - len(request.input_ids)
    if request.sampling_params.max_new_tokens <= room:
        return request
    return replace(request, sampling_params=replace(request.sampling_params, max_new_tokens=room))


def told_context(refusal: str) -> int | None:
    """The context length that a refusal tells, if a prompt or its output was too long for it."""
    told = _TOO_LONG.search(refusal)
    if told is None:
        return None
    return int(told[2]) + (BEYOND_PROMPT if told[1] == "maximum allowed length" else 0)


def read_model_limits(model_path: str | Path) -> ModelLimits:
    """The limits in a model folder's config.json; empty where there is no such file here."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return ModelLimits()
    config = json.loads(file.read_text(encoding="utf-8"))
    return ModelLimits(config.get("text_config", config).get("vocab_size"), model_length(config))


def model_length(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that a model is made for, by its config.json; None if it does not say.

    `max_position_embeddings` may be that, or what it was before the positions were scaled, from
    model to model. The larger reading counts: a service that makes less of it tells.
    """
    text = config.get("text_config", config)
    stated = text.get("max_position_embeddings")
    if not isinstance(stated, int):
        return None
    return max([stated, *_scaled(text, stated)])


def _scaled(text: Mapping[str, Any], stated: int) -> Iterator[int]:
    """What the scalings of a config reach: transformers has had three places for them."""
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    layer_types = [value for value in scaling.values() if isinstance(value, Mapping)]
    for one in layer_types or [scaling]:
        factor, original = one.get("factor"), one.get("original_max_position_embeddings")
        if isinstance(factor, int | float):
            yield int(factor * (original if isinstance(original, int) else stated))
