"""Builds an answer from chunks, and from several pieces if a service stops in the middle.

Generated tokens become part of the prompt of the next service, which generates only the rest. Each
token keeps the logprob and version of the service that made it. Presence, frequency and repetition
penalties treat earlier pieces as prompt. No I/O.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from agentrl.inference.protocol import FinishReason, GenerateRequest, Generation
from agentrl.policy_version import VersionSpan, join_spans

OnTokens = Callable[[Sequence[int]], None]


@dataclass(slots=True)
class GenerationBuilder:
    """A request and its output so far.

    `next_request` begins a piece, `add` extends it, and the caller sets `piece_ending` when the
    service reports the end of the piece. This repeats until `ending` is not None. `generation`
    returns the result. `on_tokens` is called with all ids so far when some have come; a service is
    asked for small chunks then.
    """

    request: GenerateRequest
    on_tokens: OnTokens | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    piece_ending: FinishReason | None = None
    _n_asked: int = 0  # number of pieces
    _begin: int = 0  # index of the piece's first token
    _spans_before: list[VersionSpan] = field(default_factory=list)  # of earlier pieces
    _spans: list[VersionSpan] = field(default_factory=list)  # of the piece, from its first token

    @property
    def n_piece(self) -> int:
        """Number of tokens of the piece."""
        return len(self.ids) - self._begin

    @property
    def versions(self) -> list[VersionSpan]:
        """The version spans of all tokens so far."""
        return join_spans(self._spans_before, self._spans)

    @property
    def ending(self) -> FinishReason | None:
        """Why the whole answer ended; None if it must continue, as after an aborted piece."""
        params = self.request.sampling_params
        if self.piece_ending in ("stop", "length"):
            return self.piece_ending
        if len(self.ids) >= params.max_new_tokens:
            return "length"
        if self.ids and not params.ignore_eos and self.ids[-1] in params.stop_token_ids:
            # The service failed after this token, before it reported the end.
            return "stop"
        return None

    def next_request(self) -> GenerateRequest:
        """Begin a piece; returns the request for it.

        Each piece has its own rid, because the previous service may still have the previous one. An
        answer in a schema begins anew: the next service does not know how far into it the tokens
        are.
        """
        assert not self._n_asked or self.ending is None
        if self.request.sampling_params.json_schema is not None:
            self.ids, self.logprobs, self._spans = [], [], []
        self._spans_before, self._spans = self.versions, []
        self._begin, self.piece_ending = len(self.ids), None
        self._n_asked += 1
        if self._n_asked == 1:
            return self.request
        params = self.request.sampling_params
        return GenerateRequest(
            rid=f"{self.request.rid}.{self._n_asked}",
            input_ids=np.append(self.request.input_ids, np.array(self.ids, dtype=np.int32)),
            sampling_params=replace(params, max_new_tokens=params.max_new_tokens - len(self.ids)),
        )

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        cached_tokens: int,
    ) -> None:
        """Append tokens to the piece.

        `spans` cover the whole piece, with positions from its first token, because a service may
        correct the versions of earlier tokens. `cached_tokens`: prompt tokens found in the cache.
        """
        self.ids += ids
        self.logprobs += logprobs
        self._spans = list(spans)
        if not self._begin:
            self.cached_tokens = cached_tokens
        if ids and self.on_tokens is not None:
            self.on_tokens(self.ids)

    def generation(self, service: str, latency_s: float) -> Generation:
        """The result, after the answer or its last piece has ended.

        An aborted last piece makes it an aborted generation. `service`: its URL.
        """
        reason = self.ending or self.piece_ending
        assert reason is not None
        return Generation(
            output_ids=tuple(self.ids),
            output_logprobs=tuple(self.logprobs),
            finish_reason=reason,
            versions=tuple(self.versions),
            prompt_tokens=len(self.request.input_ids),
            cached_tokens=self.cached_tokens,
            latency_s=latency_s,
            service=service,
            params=self.request.sampling_params,
            answered_at=datetime.now(UTC),
        )
