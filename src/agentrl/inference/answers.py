"""Parses answers of SGLang's API: chunks of an answer, loads and error messages. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.protocol import (
    InferenceError,
    RequestRejected,
    ServiceLoad,
    ServiceUnreachable,
    version_from_wire,
)
from agentrl.policy_version import VersionSpan, check_spans, join_spans


@dataclass(slots=True)
class ChunkReader:
    """Adds the chunks of one answer to a `GenerationBuilder`.

    A chunk repeats all output so far, or (from a server with `--incremental-streaming-output`) has
    only new output; its total number of tokens tells which. A chunk whose ids and logprobs do not
    match adds nothing, so the answer can always be trained on or continued. `source`: the service's
    URL, for errors. `most`: the number of requested tokens.
    """

    building: GenerationBuilder
    source: str
    most: int
    _version: int | None = None  # the service's version at the last chunk
    _spans: list[VersionSpan] = field(default_factory=list)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add a `/generate` chunk with logprobs, or a whole answer.

        Raises InferenceError if ids, logprobs and versions do not cover the same tokens, because a
        token without logprob or version must never reach a trainer. Raises RequestRejected if the
        service aborted the request as one that it cannot serve.
        """
        have = self.building.n_piece
        aborted = _aborted(chunk)
        status = None if aborted is None else aborted.get("status_code")
        if aborted is not None and isinstance(status, int) and 400 <= status < 500:
            # Before tokens are added, because SGLang sends one here that was never sampled.
            raise RequestRejected(
                f"{self.source}/generate refused the request: {aborted.get('message')}",
                status=status,
            )
        try:
            meta = chunk["meta_info"]
            ids: Sequence[int] = chunk["output_ids"]
            total: int = meta["completion_tokens"]
            # Absent if the answer has no tokens.
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
            if aborted is not None:
                # SGLang's abort of a queued request, such as a retracted one, lacks some fields.
                # The tokens of earlier chunks stay.
                self.building.piece_ending = "abort"
                return
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
        if total > self.most:
            raise InferenceError(
                f"{self.source}/generate gave {total} tokens where {self.most} were asked for"
            )
        self._spans = spans
        self.building.add(new_ids, logprobs, spans, cached_tokens)
        if finish is not None:
            self.building.piece_ending = finish["type"]

    def _read_spans(self, meta: Mapping[str, Any], have: int, total: int) -> list[VersionSpan]:
        """The versions of all tokens so far.

        The last chunk has them exactly. An earlier chunk has only the service's present version. If
        that has changed since the previous chunk, the new tokens get the older version until the
        last chunk corrects them, so no token ever gets a newer version than its own.
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


def read_events(buffer: bytes) -> tuple[list[bytes], bytes]:
    """Split `buffer` into the data of its complete server-sent events, and the rest."""
    *events, rest = buffer.split(b"\n\n")
    return [event[len(b"data: ") :] for event in events if event.startswith(b"data: ")], rest


def stream_error(event: Mapping[str, Any], source: str) -> InferenceError | None:
    """The error that an event of a stream reports; None if it reports none."""
    error = event.get("error")
    if error is None:
        return None
    said = error if isinstance(error, dict) else {"message": error}
    message, code = f"{source}/generate: {said.get('message')}", said.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return RequestRejected(message, status=code)
    return ServiceUnreachable(message)


def parse_loads(answer: Mapping[str, Any], source: str) -> ServiceLoad:
    """Parse a `/v1/loads` answer. Raises InferenceError."""
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
    """The message of an error body, in any of SGLang's four forms, one of which is plain text."""
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


def _aborted(chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The finish reason of a chunk that reports an abort; None for any other chunk."""
    meta = chunk.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    return finish if isinstance(finish, Mapping) and finish.get("type") == "abort" else None


def _tail(values: Sequence[Any], have: int, total: int) -> Sequence[Any]:
    """The new ones of a chunk's `values`, which are all `total` of them, or those after `have`.

    Raises ValueError for any other number of values.
    """
    if len(values) == total:
        return values[have:]
    if len(values) == total - have:
        return values
    raise ValueError(f"{len(values)} values in a chunk of {have} to {total} tokens")
