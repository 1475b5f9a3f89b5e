"""SGLang's JSON of `/generate`: bodies to requests, requests to answers. Pure.

`server` has the routes and status codes; SGLang's documentation describes the API.
"""

import time
import uuid
from dataclasses import dataclass

from agentrl.inference.engine.request import LiveRequest
from agentrl.inference.engine.sampling import TokenSampling
from agentrl.inference.engine.text import StopStrings, Text

_UNSUPPORTED_SAMPLING = frozenset(
    {
        "beam_width",
        "custom_params",
        "ebnf",
        "json_schema",
        "logit_bias",
        "regex",
        "stop_regex",
        "structural_tag",
        "watermark",
    }
)
_UNSUPPORTED_FIELDS = (
    "custom_logit_processor",
    "input_embeds",
    "lora_path",
    "return_hidden_states",
    "return_routed_experts",
    "token_ids_logprob",
    "top_logprobs_num",
)

# While a body is parsed the engine makes no step.
_MOST_GENERATIONS = 4096


class BodyError(ValueError):
    """A body that breaks the JSON contract: SGLang answers `{"error": "<str>"}`."""


class RequestError(ValueError):
    """A request that cannot be served: SGLang answers `{"error": {"message": "<str>"}}`."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What the served model accepts, and the ids that end its sequences."""

    vocab_size: int
    context_length: int
    end_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One generation that a body asks for, and the form of its answer."""

    rid: str
    input_ids: list[int]
    sampling: TokenSampling
    max_new_tokens: int
    end_ids: frozenset[int]
    stop_strings: StopStrings | None
    return_logprob: bool
    skip_special_tokens: bool
    trim_stop: bool
    stream_interval: int = 1


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """The generations of one body, in the order of the answer.

    many: the answer is a list
    stream: the output of the only generation is streamed
    """

    prompts: list[PromptRequest]
    many: bool
    stream: bool


class _Params:
    """`sampling_params` as sent. Each known name is read once; `nothing_left` refuses the rest."""

    def __init__(self, params: object) -> None:
        if params is None:
            params = {}
        if not isinstance(params, dict):
            raise BodyError(f"sampling_params must be an object, got {params!r:.100}")
        # As in SGLang, null means the default.
        self._left = {name: value for name, value in params.items() if value is not None}

    def number(self, name: str, default: float) -> float:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BodyError(f"sampling_params.{name} must be a number, got {value!r:.100}")
        return float(value)

    def integer(self, name: str, default: int) -> int:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BodyError(f"sampling_params.{name} must be an integer, got {value!r:.100}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name, 0) if name in self._left else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise BodyError(f"sampling_params.{name} must be true or false, got {value!r:.100}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._left.pop(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise BodyError(f"sampling_params.{name} must be strings, got {value!r:.100}")
        return tuple(v for v in values if v)

    def ids(self, name: str) -> frozenset[int]:
        value = self._left.pop(name, [])
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise BodyError(f"sampling_params.{name} must be a list of ids, got {value!r:.100}")
        return frozenset(value)

    def nothing_left(self) -> None:
        for name in self._left:
            if name in _UNSUPPORTED_SAMPLING:
                raise RequestError(
                    f"sampling_params.{name} needs SGLang: the local engine has none"
                )
            raise BodyError(f"Unexpected keyword argument '{name}' in sampling_params")


def parse_generate(body: object, limits: PromptLimits, text: Text) -> GenerateBody:
    """Parse a `/generate` body.

    Raises BodyError or RequestError; then nothing of the body is served.
    """
    if not isinstance(body, dict):
        raise BodyError("the body must be a JSON object")
    for name in _UNSUPPORTED_FIELDS:
        if body.get(name):
            raise RequestError(f"{name} needs SGLang: the local engine has none")
    if body.get("return_logprob") and (body.get("logprob_start_len") or -1) >= 0:
        raise RequestError("logprob_start_len needs SGLang: the local engine has output logprobs")
    inputs, many = _inputs(body, limits, text)
    rids = _one_for_each(body.get("rid"), len(inputs), many, "rid")
    params = _one_for_each(body.get("sampling_params"), len(inputs), many, "sampling_params")
    logprobs = _one_for_each(body.get("return_logprob"), len(inputs), many, "return_logprob")
    prompts: list[PromptRequest] = []
    for ids, rid, sent, logprob in zip(inputs, rids, params, logprobs, strict=True):
        if rid is not None and not isinstance(rid, str):
            raise BodyError(f"rid must be a string, got {rid!r:.100}")
        copies = _prompts(ids, rid, _Params(sent), bool(logprob), limits, text)
        many = many or len(copies) > 1
        prompts += copies
        _check_count(len(prompts))
    stream = bool(body.get("stream"))
    if stream and many:
        raise RequestError("a stream of several generations needs SGLang: the local engine has one")
    return GenerateBody(prompts, many, stream)


def _inputs(
    body: dict[str, object], limits: PromptLimits, text: Text
) -> tuple[list[list[int]], bool]:
    """The prompts' ids, and whether the body is a batch."""
    sent_text, sent_ids = body.get("text"), body.get("input_ids")
    if (sent_text is None) == (sent_ids is None):
        raise BodyError("Either text or input_ids should be provided, and not both.")
    if sent_text is not None:
        if not text.known:
            raise RequestError("the served model has no tokenizer: send input_ids instead of text")
        sent = sent_text if isinstance(sent_text, list) else [sent_text]
        texts = [t for t in sent if isinstance(t, str)]
        if not texts or len(texts) < len(sent):
            raise BodyError("text must be a string or a list of strings")
        _check_count(len(texts))
        if any(len(t) > limits.context_length * text.longest_token for t in texts):
            raise RequestError(
                f"The input is longer than the model's context length"
                f" ({limits.context_length} tokens)."
            )
        return [text.encode(t) for t in texts], isinstance(sent_text, list)
    if not isinstance(sent_ids, list) or not sent_ids:
        raise BodyError("input_ids must be a list of ids, or a list of such lists, and not empty")
    many = isinstance(sent_ids[0], list)
    batch: list[list[int]] = sent_ids if many else [sent_ids]
    _check_count(len(batch))
    for ids in batch:
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise BodyError("input_ids must be a list of ids, or a list of such lists")
    return batch, many


def _check_count(generations: int) -> None:
    if generations > _MOST_GENERATIONS:
        raise RequestError(
            f"One request asks for {generations} generations, more than {_MOST_GENERATIONS}."
        )


def _one_for_each(value: object, count: int, many: bool, name: str) -> list[object]:
    """Expand a field that is given once for all prompts of a batch, or once for each."""
    if not isinstance(value, list):
        if many and name == "rid" and isinstance(value, str):
            return [f"{value}_{index}" for index in range(count)]
        return [value] * count
    if not many or len(value) != count:
        raise BodyError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _prompts(
    ids: list[int],
    rid: str | None,
    params: _Params,
    return_logprob: bool,
    limits: PromptLimits,
    text: Text,
) -> list[PromptRequest]:
    """Return the `n` generations of one prompt. With n > 1 each gets a new rid, as in SGLang."""
    sampling = TokenSampling(
        temperature=params.number("temperature", 1.0),
        top_p=params.number("top_p", 1.0),
        top_k=params.integer("top_k", -1),
        min_p=params.number("min_p", 0.0),
        presence_penalty=params.number("presence_penalty", 0.0),
        frequency_penalty=params.number("frequency_penalty", 0.0),
        repetition_penalty=params.number("repetition_penalty", 1.0),
        min_new_tokens=params.integer("min_new_tokens", 0),
        seed=params.optional_integer("sampling_seed"),
    )
    max_new_tokens = params.integer("max_new_tokens", 128)
    n = params.integer("n", 1)
    strings = params.strings("stop")
    stop_ids = params.ids("stop_token_ids")
    ignore_eos = params.flag("ignore_eos", False)
    skip_special_tokens = params.flag("skip_special_tokens", True)
    trim_stop = not params.flag("no_stop_trim", False)
    params.flag("spaces_between_special_tokens", True)
    stream_interval = params.integer("stream_interval", 1)
    params.nothing_left()
    try:
        sampling = sampling.checked()
    except ValueError as error:
        raise RequestError(str(error)) from error
    if n < 1:
        raise RequestError(f"n must be at least 1, got {n}.")
    _check_count(n)
    if strings and not text.known:
        raise RequestError("the served model has no tokenizer: use stop_token_ids instead of stop")
    _check_length(ids, max_new_tokens, limits)
    # As in SGLang, ignore_eos also lets stop_token_ids pass.
    ends = frozenset() if ignore_eos else limits.end_ids | stop_ids
    end_ids = frozenset(i for i in ends if 0 <= i < limits.vocab_size)  # others never come
    _check_minimum(sampling.min_new_tokens, max_new_tokens, end_ids, limits)
    return [
        PromptRequest(
            rid=rid if rid is not None and n == 1 else uuid.uuid4().hex,
            input_ids=ids,
            sampling=sampling if copy == 0 else sampling.for_copy(copy),
            max_new_tokens=max_new_tokens,
            end_ids=end_ids,
            stop_strings=StopStrings(text, strings) if strings else None,
            return_logprob=return_logprob,
            skip_special_tokens=skip_special_tokens,
            trim_stop=trim_stop,
            stream_interval=stream_interval,
        )
        for copy in range(n)
    ]


def _check_length(ids: list[int], max_new_tokens: int, limits: PromptLimits) -> None:
    if not ids:
        raise RequestError("The input is empty.")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise RequestError(
            f"The input holds token id {wrong}, outside the {limits.vocab_size} ids."
        )
    if len(ids) >= limits.context_length:
        raise RequestError(
            f"The input ({len(ids)} tokens) is longer than the model's context length"
            f" ({limits.context_length} tokens)."
        )
    if max_new_tokens < 0:
        raise RequestError(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
    if len(ids) + max_new_tokens > limits.context_length:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of"
            f" {limits.context_length} tokens: {len(ids)} tokens of input and {max_new_tokens} of"
            " completion."
        )


def _check_minimum(
    min_new_tokens: int, max_new_tokens: int, end_ids: frozenset[int], limits: PromptLimits
) -> None:
    if min_new_tokens > max_new_tokens:
        raise RequestError(
            f"min_new_tokens must be in [0, max_new_tokens({max_new_tokens})],"
            f" got {min_new_tokens}."
        )
    if min_new_tokens and len(end_ids) == limits.vocab_size:
        raise RequestError("Every token ends the generation: min_new_tokens cannot be reached.")


def generate_answer(
    request: LiveRequest, prompt: PromptRequest, text: Text, latest_version: str
) -> dict[str, object]:
    """Return the answer for a request, or a chunk of its stream if it has not ended.

    As in SGLang a chunk has all output so far, but no text and no version spans.
    """
    output = request.output_ids
    cached = request.cached_tokens or 0
    ended = request.finish is not None
    meta: dict[str, object] = {
        "id": request.rid,
        "finish_reason": _finish_reason(request),
        "prompt_tokens": len(request.prompt_ids),
        "weight_version": request.newest_version or latest_version,
        "num_retractions": request.retractions,
    }
    if prompt.return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            (logprob, token, None)
            for logprob, token in zip(request.output_logprobs, output, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(output)
    meta |= {"reasoning_tokens": 0, "completion_tokens": len(output), "cached_tokens": cached}
    if ended:
        ends = [*(span.start for span in request.spans), len(output)][1:]
        # Without a span: it ended before it ran.
        meta["weight_versions"] = [
            {"version": span.version, "start": span.start, "end": end}
            for span, end in zip(request.spans, ends, strict=True)
            if end > span.start
        ]
    meta |= {
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
        "e2e_latency": time.monotonic() - request.arrived,
        "response_sent_to_client_ts": time.time(),
    }
    said = _text(request, prompt, text) if ended else None
    return {"text": said, "output_ids": output, "meta_info": meta}


def _finish_reason(request: LiveRequest) -> dict[str, object] | None:
    finish = request.finish
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": len(request.output_ids)}
    return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}


def _text(request: LiveRequest, prompt: PromptRequest, text: Text) -> str:
    """The text of an ended request."""
    assert request.finish is not None
    shown, matched = request.output_ids, request.finish.matched
    if prompt.trim_stop and isinstance(matched, int):
        shown = shown[:-1]
    said = text.decode(shown, skip_special_tokens=prompt.skip_special_tokens)
    if prompt.trim_stop and isinstance(matched, str) and prompt.stop_strings is not None:
        said = prompt.stop_strings.trim(said)
    return said
