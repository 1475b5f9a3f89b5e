"""What SGLang's API sends, as values: chunks of an answer, loads, error messages. Pure."""

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
    """Takes the chunks in which a service answers, one after the other, into what they build.

    Chunks repeat all output so far, or (a server with `--incremental-streaming-output`) hold only
    what is new: how many tokens there are in all says which. Nothing is taken from a chunk whose
    ids and logprobs do not fit together, so that what is built can always be trained on or
    continued. `source`: the service's URL, for errors. `most`: how many tokens were asked for. One
    reader for each answer.
    """

    building: GenerationBuilder
    source: str
    most: int
    _version: int | None = None  # what the service had when it sent the last chunk
    _spans: list[VersionSpan] = field(default_factory=list)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take one `/generate` chunk (with logprobs) or the whole answer of one.

        Raises InferenceError when ids, logprobs and versions do not cover each other exactly: a
        token without its logprob or version must never reach a trainer. Raises RequestRejected
        when the service aborted the request as one that it cannot serve.
        """
        have = self.building.n_piece
        aborted = _aborted(chunk)
        status = None if aborted is None else aborted.get("status_code")
        if aborted is not None and isinstance(status, int) and 400 <= status < 500:
            # Before any token is taken: SGLang sends one along that was never sampled.
            raise RequestRejected(
                f"{self.source}/generate refused the request: {aborted.get('message')}",
                status=status,
            )
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
            if aborted is not None:
                # SGLang aborts what waits in its queue, a retracted request for one, with less
                # than it says otherwise: the tokens that came before it stay.
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


def _aborted(chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Why the service aborted the request, if a chunk that says little else says that."""
    meta = chunk.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    return finish if isinstance(finish, Mapping) and finish.get("type") == "abort" else None


def _tail(values: Sequence[Any], have: int, total: int) -> Sequence[Any]:
    """What of a chunk's values is new: it holds all `total` of them, or those after `have`."""
    if len(values) == total:
        return values[have:]
    if len(values) == total - have:
        return values
    raise ValueError(f"{len(values)} values in a chunk of {have} to {total} tokens")
