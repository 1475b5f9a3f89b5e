"""What SGLang's API sends, as values: chunks of an answer, loads, model limits, error messages.

Pure, but for the reading of a model folder's config.json.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.protocol import (
    GenerateRequest,
    InferenceError,
    ModelLimits,
    PromptTooLong,
    RequestRejected,
    ServiceLoad,
    ServiceUnreachable,
    version_from_wire,
)
from agentrl.policy_version import VersionSpan, check_spans, join_spans

# Of the context, SGLang keeps two positions for itself, and it refuses a prompt that leaves fewer
# than five for the output. The longest prompt that `/server_info` tells is the first refused one.
_KEPT_POSITIONS = 2
_LEAST_ROOM = 5
BEYOND_PROMPT = _KEPT_POSITIONS + _LEAST_ROOM - 1


@dataclass(slots=True)
class ChunkReader:
    """Takes the chunks in which a service answers, one after the other, into what they build.

    Chunks repeat all output so far, or (a server with `--incremental-streaming-output`) hold only
    what is new: how many tokens there are in all says which. Nothing is taken from a chunk whose
    ids and logprobs do not fit together, so that what is built can always be trained on or
    continued. `source`: the service's URL, for errors. One reader for each answer.
    """

    building: GenerationBuilder
    source: str
    _version: int | None = None  # what the service had when it sent the last chunk
    _spans: list[VersionSpan] = field(default_factory=list)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take one `/generate` chunk (with logprobs) or the whole answer of one.

        Raises InferenceError when ids, logprobs and versions do not cover each other exactly: a
        token without its logprob or version must never reach a trainer. Raises RequestRejected
        when the service aborted the request as one that it cannot serve.
        """
        have = self.building.n_piece
        try:
            meta = chunk["meta_info"]
            ids: Sequence[int] = chunk["output_ids"]
            total: int = meta["completion_tokens"]
            # Absent in an answer of no token at all.
            triples: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or []
            finish = meta["finish_reason"]
            cached_tokens = meta["cached_tokens"]
            if finish is not None and finish["type"] not in ("stop", "length", "abort"):
                raise ValueError(f"finish reason {finish['type']!r}")
            new_ids, new = _tail(ids, have, total), _tail(triples, have, total)
            logprobs = [float(triple[0]) for triple in new]
            agree = [triple[1] for triple in new] == list(new_ids)
            spans = self._read_spans(meta, have, total)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise InferenceError(
                f"{self.source}/generate gave an answer that is not SGLang's ({error!r}):"
                f" {chunk!r:.300}"
            ) from error
        if not agree:
            raise InferenceError(
                f"{self.source}/generate: logprobs and output_ids name different tokens"
            )
        try:
            check_spans(spans, total)
        except ValueError as error:
            raise InferenceError(f"{self.source}/generate: {error}") from None
        self._spans = spans
        self.building.add(new_ids, logprobs, spans, cached_tokens)
        if finish is not None:
            self.building.piece_ending = finish["type"]
            status = finish.get("status_code")
            if status is not None and 400 <= status < 500:
                raise RequestRejected(
                    f"{self.source}/generate refused the request: {finish.get('message')}",
                    status=status,
                )

    def _read_spans(self, meta: Mapping[str, Any], have: int, total: int) -> list[VersionSpan]:
        """The versions of all tokens so far.

        The last chunk says them exactly. An earlier one says only which version is there now; the
        tokens of a chunk during which that changed count as the older one's until the last chunk
        corrects it, so that no token ever counts as younger than it is.
        """
        exact = meta.get("weight_versions")
        if exact is not None:
            return [
                VersionSpan(version_from_wire(span["version"]), span["start"], span["end"])
                for span in exact
                if span["end"] > span["start"]
            ]
        then, now = self._version, version_from_wire(meta["weight_version"])
        self._version = now
        if total == have:
            return self._spans
        made_by = now if then is None else then
        return join_spans(self._spans, [VersionSpan(made_by, 0, total - have)])


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
    room = limits.context_length - _KEPT_POSITIONS - len(request.input_ids)
    if room < _LEAST_ROOM:
        raise PromptTooLong(
            f"request {request.rid}: the prompt of {len(request.input_ids)} tokens leaves no room"
            f" in the service's context of {limits.context_length}: shorten it, or start the"
            " service with a longer context"
        )
    if request.sampling_params.max_new_tokens <= room:
        return request
    return replace(request, sampling_params=replace(request.sampling_params, max_new_tokens=room))


def read_events(buffer: bytes) -> tuple[list[bytes], bytes]:
    """The data of the server-sent events that are whole in `buffer`, and what is left of it."""
    *events, rest = buffer.split(b"\n\n")
    return [event[len(b"data: ") :] for event in events if event.startswith(b"data: ")], rest


def stream_error(event: Mapping[str, Any], source: str) -> InferenceError | None:
    """The error that an event of a stream is, if it is one."""
    error = event.get("error")
    if error is None:
        return None
    said = error if isinstance(error, dict) else {"message": error}
    message, code = f"{source}/generate: {said.get('message')}", said.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return RequestRejected(message, status=code)
    return ServiceUnreachable(message)


def parse_loads(answer: Mapping[str, Any], source: str) -> ServiceLoad:
    """A `/v1/loads` answer."""
    try:
        ranks = answer["loads"]
        return ServiceLoad(
            running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            used_tokens=sum(int(rank["num_used_tokens"]) for rank in ranks),
            total_tokens=sum(int(rank["max_total_num_tokens"]) for rank in ranks),
            retractions=sum(int(rank["queues"]["retracted"]) for rank in ranks),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InferenceError(
            f"{source}/v1/loads gave an answer that is not SGLang's ({error!r}): {answer!r:.300}"
        ) from error


def error_message(content: bytes) -> str:
    """The message of an error body: SGLang has four forms, plain text among them."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace").strip() or "(empty answer)"
    if isinstance(body, dict):
        error = body.get("error", body.get("message", body))
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)
    return str(body)


def read_model_limits(model_path: str) -> ModelLimits:
    """The limits in a model folder's config.json; empty where there is no such file here."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return ModelLimits()
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    return ModelLimits(text.get("vocab_size"), text.get("max_position_embeddings"))


def _tail(values: Sequence[Any], have: int, total: int) -> Sequence[Any]:
    """What of a chunk's values is new: it holds all `total` of them, or those after `have`."""
    if len(values) == total:
        return values[have:]
    if len(values) == total - have:
        return values
    raise ValueError(f"{len(values)} values in a chunk of {have} to {total} tokens")
