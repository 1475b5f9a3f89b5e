"""The largest length of a prompt with its answer: the model's length and the service's context.

Pure, except that a model folder's config.json is read.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.inference.protocol import GenerateRequest, ModelLimits, PromptTooLong, RequestRejected

# SGLang reserves two positions of the context, and refuses a prompt that leaves fewer than five for
# the output. The longest prompt that `/server_info` reports is the shortest refused one.
_KEPT_POSITIONS = 2
_LEAST_ROOM = 5
BEYOND_PROMPT = _KEPT_POSITIONS + _LEAST_ROOM - 1

# The refusals of SGLang, its router, the local engine and other services:
#   The input (2000 tokens) is longer than the model's context length (1024 tokens).
#   Requested token count exceeds the model's maximum context length of 1024 tokens. …
#   Input length (2000 tokens) exceeds the maximum allowed length (1018 tokens). …
_TOO_LONG = re.compile(r"(context length|maximum allowed length)(?: of| is)? \(?(\d+) tokens")


def longest_prompt(context_length: int) -> int:
    """Length in tokens of the longest prompt that a service with this context answers."""
    return context_length - BEYOND_PROMPT - 1


def fit_request(request: GenerateRequest, limits: ModelLimits) -> GenerateRequest:
    """Return the request with `max_new_tokens` cut to the room in the context.

    Raises RequestRejected for an empty prompt and for a token id outside the vocabulary, which
    crashes SGLang, and PromptTooLong for a prompt that leaves no room for an answer.
    """
    if not len(request.input_ids):
        raise RequestRejected(f"request {request.rid}: the prompt is empty")
    least, largest = int(request.input_ids.min()), int(request.input_ids.max())
    if least < 0 or (limits.vocab_size is not None and largest >= limits.vocab_size):
        raise RequestRejected(
            f"request {request.rid}: prompt ids run from {least} to"
            f" {largest} but the model's vocabulary is {limits.vocab_size} ids"
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
    """Parse the context length from a refusal of a request that is too long; None for others."""
    told = _TOO_LONG.search(refusal)
    if told is None:
        return None
    return int(told[2]) + (BEYOND_PROMPT if told[1] == "maximum allowed length" else 0)


def read_model_limits(model_path: str | Path) -> ModelLimits:
    """Read the limits from a model folder's config.json; unknown if the file does not exist."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return ModelLimits()
    config = json.loads(file.read_text(encoding="utf-8"))
    return ModelLimits(config.get("text_config", config).get("vocab_size"), model_length(config))


def model_length(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a model by its config.json, in tokens; None if it is not stated.

    Models give `max_position_embeddings` before or after RoPE scaling. The larger interpretation is
    returned; a service with a shorter context reports its own.
    """
    text = config.get("text_config", config)
    stated = text.get("max_position_embeddings")
    if not isinstance(stated, int):
        return None
    return max([stated, *_scaled(text, stated)])


def _scaled(text: Mapping[str, Any], stated: int) -> Iterator[int]:
    """Yield the lengths of all RoPE scalings of a config; transformers has had three formats."""
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    layer_types = [value for value in scaling.values() if isinstance(value, Mapping)]
    for one in layer_types or [scaling]:
        factor, original = one.get("factor"), one.get("original_max_position_embeddings")
        if isinstance(factor, int | float):
            yield int(factor * (original if isinstance(original, int) else stated))
