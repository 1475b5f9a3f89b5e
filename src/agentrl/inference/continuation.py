"""A request that goes on after its service stopped in the middle: the pieces made into one answer.

Pure. What was generated becomes part of the prompt of the next service, which generates only the
rest; each token keeps the logprob and version of the service that made it. Presence, frequency and
repetition penalties see the earlier pieces as prompt.
"""

from dataclasses import dataclass, field, replace

from agentrl.inference.answers import StreamedOutput, join_spans
from agentrl.inference.protocol import FinishReason, GenerateRequest, Generation, VersionSpan


@dataclass(slots=True)
class Continuation:
    """A request with what its services have made of it so far."""

    request: GenerateRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    _asked: int = 0

    def next_request(self) -> GenerateRequest:
        """What to ask of the next service, under a rid of its own: the last may still hold its."""
        assert self.finish_reason is None
        self._asked += 1
        if self._asked == 1:
            return self.request
        params = self.request.sampling_params
        left = params.max_new_tokens - len(self.ids)
        return GenerateRequest(
            rid=f"{self.request.rid}.{self._asked}",
            input_ids=self.request.input_ids + tuple(self.ids),
            sampling_params=replace(params, max_new_tokens=left),
        )

    def add(self, output: StreamedOutput) -> int:
        """Take what a service made, whether it finished or not; returns its number of tokens."""
        if not self.ids:
            self.cached_tokens = output.cached_tokens
        self.ids += output.ids
        self.logprobs += output.logprobs
        self.spans = join_spans(self.spans, output.spans)
        params = self.request.sampling_params
        if output.finish_reason in ("stop", "length"):
            self.finish_reason = output.finish_reason
        elif len(self.ids) >= params.max_new_tokens:
            self.finish_reason = "length"
        elif self.ids and not params.ignore_eos and self.ids[-1] in params.stop_token_ids:
            # Its service died between this token and saying that it was the last one.
            self.finish_reason = "stop"
        return len(output.ids)

    def generation(self, latency_s: float) -> Generation:
        """The answer, once it is whole."""
        assert self.finish_reason is not None
        return Generation(
            output_ids=tuple(self.ids),
            output_logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            versions=tuple(self.spans),
            prompt_tokens=len(self.request.input_ids),
            cached_tokens=self.cached_tokens,
            latency_s=latency_s,
        )
