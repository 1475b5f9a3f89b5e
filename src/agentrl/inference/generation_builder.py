"""One answer while it grows: chunk by chunk, and in pieces where its service stops in the middle.

Pure. What was generated becomes part of the prompt of the next service, which generates only the
rest; each token keeps the logprob and version of the service that made it. Presence, frequency and
repetition penalties see the earlier pieces as prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentrl.inference.protocol import FinishReason, GenerateRequest, Generation
from agentrl.policy_version import VersionSpan, join_spans


@dataclass(slots=True)
class GenerationBuilder:
    """A request and what its services have made of it so far; ends as a `Generation`.

    Order of calls: `next_request` begins a piece, `add` grows it, and who adds sets `piece_ending`
    if its service came so far. Then again, until `ending` says that the answer is whole.
    """

    request: GenerateRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    piece_ending: FinishReason | None = None
    _n_asked: int = 0
    _begin: int = 0  # of the piece, among the tokens
    _spans_before: list[VersionSpan] = field(default_factory=list)  # of the pieces before
    _spans: list[VersionSpan] = field(default_factory=list)  # of the piece, from its begin on

    @property
    def n_piece(self) -> int:
        """How many tokens the piece has."""
        return len(self.ids) - self._begin

    @property
    def versions(self) -> list[VersionSpan]:
        """Which versions made the tokens so far."""
        return join_spans(self._spans_before, self._spans)

    @property
    def ending(self) -> FinishReason | None:
        """How the whole answer ended; None while it has to go on, as after an aborted piece."""
        params = self.request.sampling_params
        if self.piece_ending in ("stop", "length"):
            return self.piece_ending
        if len(self.ids) >= params.max_new_tokens:
            return "length"
        if self.ids and not params.ignore_eos and self.ids[-1] in params.stop_token_ids:
            # Its service died between this token and saying that it was the last one.
            return "stop"
        return None

    def next_request(self) -> GenerateRequest:
        """What to ask of the next service, under a rid of its own: the last may still hold its."""
        assert not self._n_asked or self.ending is None
        self._spans_before, self._spans = self.versions, []
        self._begin, self.piece_ending = len(self.ids), None
        self._n_asked += 1
        if self._n_asked == 1:
            return self.request
        params = self.request.sampling_params
        return GenerateRequest(
            rid=f"{self.request.rid}.{self._n_asked}",
            input_ids=self.request.input_ids + tuple(self.ids),
            sampling_params=replace(params, max_new_tokens=params.max_new_tokens - len(self.ids)),
        )

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        cached_tokens: int,
    ) -> None:
        """Append tokens to the piece. `spans` are those of the whole piece, counted from its begin:
        a service may correct at last what it said of earlier tokens."""
        self.ids += ids
        self.logprobs += logprobs
        self._spans = list(spans)
        if not self._begin:
            self.cached_tokens = cached_tokens

    def generation(self, service: str, latency_s: float) -> Generation:
        """The answer, once it or its piece has ended; an aborted piece makes it an aborted one."""
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
        )
