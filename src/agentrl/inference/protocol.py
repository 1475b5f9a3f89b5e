"""Requests to an inference service, its answers and its errors, as values.

There is no I/O here, and no JSON except the names of sampling parameters and versions. `answers`
parses answers; `client` does the exchange.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentrl.failures import InfrastructureFailure, Need
from agentrl.policy_version import VersionSpan, check_spans, cut_spans

FinishReason = Literal["stop", "length", "abort"]

FRESH_VERSION = -1
"""The version of a server that was never updated ("default" in SGLang's API)."""

_FRESH_WIRE = "default"

INFERENCE = "inference"
"""The services as a dependency of a run."""


class InferenceError(Exception):
    """A request to an inference service failed."""


class _ServiceFailed(InferenceError, InfrastructureFailure):
    """A failure of the services, which are one dependency: any of them can serve a request."""

    need = Need.SAMPLING

    def __init__(self, message: str) -> None:
        InfrastructureFailure.__init__(self, message, dependency=INFERENCE)


class ServiceUnreachable(_ServiceFailed):
    """No complete answer: the connection was refused or broke, or the service is not ready.

    Generation has no side effect, so the request may be sent to another service.
    """


class KeyRefused(ServiceUnreachable):
    """The service refuses our key. It is an outage, because keys are rotated."""


class RequestTimedOut(_ServiceFailed):
    """The service is reachable, but its answer did not begin or continue in time."""


class RequestRejected(InferenceError):
    """The service, or the client before sending, refused the request. A repetition does not help.

    `status`: the HTTP status; None if the client refused.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PromptTooLong(RequestRejected):
    """The prompt leaves no room for an answer in the service's context. Nothing was generated."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, with the names, defaults and meanings of SGLang.

    `temperature` 0 is greedy. `top_k` -1 keeps the whole vocabulary. `stop`: texts that end the
    output, which has the first of them at its end. `json_schema`: of the output, as JSON text; an
    engine without grammars refuses it. The presence and frequency penalties are subtracted from the
    logits of earlier tokens; the repetition penalty scales them.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: str | None = None

    def to_json(self) -> dict[str, object]:
        """The `sampling_params` object of `/generate`, without values at their default."""
        body: dict[str, object] = {"max_new_tokens": self.max_new_tokens}
        if self.temperature != 1.0:
            body["temperature"] = self.temperature
        if self.top_p != 1.0:
            body["top_p"] = self.top_p
        if self.top_k != -1:
            body["top_k"] = self.top_k
        if self.min_p != 0.0:
            body["min_p"] = self.min_p
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.stop:
            body["stop"] = list(self.stop)
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.presence_penalty != 0.0:
            body["presence_penalty"] = self.presence_penalty
        if self.frequency_penalty != 0.0:
            body["frequency_penalty"] = self.frequency_penalty
        if self.repetition_penalty != 1.0:
            body["repetition_penalty"] = self.repetition_penalty
        if self.json_schema is not None:
            body["json_schema"] = self.json_schema
        return body


@dataclass(frozen=True, slots=True, eq=False, init=False)
class GenerateRequest:
    """A request to generate from a token prompt `input_ids` [n].

    The ids are an array, because garbage collection visits each number of a list: with hundreds of
    long prompts in flight, that would stop the event loop for tenths of a second.

    `rid` names it for `abort`. It must stay unique for some seconds after the end of the request,
    because SGLang aborts a request of that rid 2 s after the end of a stream.
    """

    rid: str
    input_ids: NDArray[np.int32]
    sampling_params: SamplingParams

    def __init__(
        self, rid: str, input_ids: ArrayLike, sampling_params: SamplingParams = SamplingParams()
    ) -> None:
        given = np.asarray(input_ids)
        if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
            raise ValueError(f"request {rid}: a prompt is a list of token ids")
        if len(given) and (given.min() < -(2**31) or given.max() >= 2**31):
            raise ValueError(f"request {rid}: a token id has more than 32 bits")
        ids = given.astype(np.int32)  # a copy, because the caller's may grow
        ids.flags.writeable = False
        object.__setattr__(self, "rid", rid)
        object.__setattr__(self, "input_ids", ids)
        object.__setattr__(self, "sampling_params", sampling_params)


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to a `GenerateRequest`.

    output_ids: the sampled tokens, the stop token included
    output_logprobs: logprob of each token under log_softmax(logits / temperature), without the
        effect of top_p, top_k and min_p
    versions: cover the output without gaps
    service: URL of the service that made the output, or its last piece
    cached_tokens: how many of the `prompt_tokens` were in the cache
    latency_s: seconds from the request to the end
    params: the request's sampling parameters, if they are known
    replayed: id of the stored turn that it was read from; None if it was sampled
    answered_at: when its last token had come, where that is known

    An aborted generation keeps the tokens so far. Columns are tuples of Python numbers, immutable
    and accepted by tokenizers, chat templates and stored documents. Raises ValueError if their
    lengths differ.

    The table shows the generations of a record of three turns; `databases/token_tree.py` shows the
    row that they become. The weights changed to policy 5 within turn 1. The context was rewritten
    after turn 1: the prompt of turn 2 shares only its first 3 tokens with the others and begins a
    branch. Prompts and tool results get mask 0, sampled tokens mask 1.

        turn  prompt                     tokens made   logprobs       made by
        0     1 2 3                      10 11         -0.5 -0.25     4 4
              the tool's result: 20 21
        1     1 2 3 10 11 20 21          12 13         -1.0 -0.125    4 5
        2     1 2 3 30                   14            -2.0           5

    >>> made = Generation(
    ...     output_ids=(12, 13), output_logprobs=(-1.0, -0.125), finish_reason="stop",
    ...     versions=(VersionSpan(4, 0, 1), VersionSpan(5, 1, 2)),
    ...     prompt_tokens=7, cached_tokens=5, latency_s=0.5, service="http://10.0.0.7:30000",
    ... )
    >>> made.part(1, 2).output_ids, made.part(1, 2).versions
    ((13,), (VersionSpan(version=5, start=0, end=1),))
    """

    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    cached_tokens: int
    latency_s: float
    service: str
    params: SamplingParams | None = None
    replayed: str | None = None
    answered_at: datetime | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.output_logprobs):
            raise ValueError(
                f"{len(self.output_ids)} tokens with {len(self.output_logprobs)} logprobs"
            )
        check_spans(self.versions, len(self.output_ids))

    def part(self, begin: int, end: int) -> "Generation":
        """Return tokens `begin` to `end` (half open) as a generation."""
        return replace(
            self,
            output_ids=self.output_ids[begin:end],
            output_logprobs=self.output_logprobs[begin:end],
            versions=tuple(cut_spans(self.versions, begin, end)),
        )


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """The load of a service, summed over its data-parallel ranks.

    `used_tokens` of the `total_tokens` positions of the KV cache are in use. `retractions` counts
    requests that lost their cache for lack of room; SGLang counts them since its last report.
    """

    running: int
    waiting: int
    used_tokens: int
    total_tokens: int
    retractions: int


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of a service's model. None is unknown and not checked."""

    vocab_size: int | None = None
    context_length: int | None = None


UNKNOWN_LIMITS = ModelLimits()


def version_to_wire(version: int) -> str:
    """Convert a policy version to the `weight_version` string of SGLang's API."""
    return _FRESH_WIRE if version == FRESH_VERSION else str(version)


def version_from_wire(version: str) -> int:
    """Parse the policy version of a `weight_version` string.

    Raises ValueError if it is neither a decimal number nor "default".
    """
    if version == _FRESH_WIRE:
        return FRESH_VERSION
    if not version.isdecimal():
        raise ValueError(
            f"weight version {version!r} is not one that this project published: start the service"
            " without --weight-version, or with a decimal number"
        )
    return int(version)
