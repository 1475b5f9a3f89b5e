"""What is asked of an inference service and what it answers: values and errors.

No I/O in here, and no JSON but the names of sampling parameters and versions; `answers` reads what
a service sends, `client` does the exchange.
"""

from dataclasses import dataclass, replace
from typing import Literal

from agentrl.failures import InfrastructureFailure, Need
from agentrl.policy_version import VersionSpan, check_spans, cut_spans

FinishReason = Literal["stop", "length", "abort"]

FRESH_VERSION = -1
"""The version of a server that was started and never updated ("default" on the wire)."""

_FRESH_WIRE = "default"

INFERENCE = "inference"
"""The services as a dependency of a run."""


class InferenceError(Exception):
    """A request to an inference service failed."""


class _ServiceFailed(InferenceError, InfrastructureFailure):
    """The services are the fault. As a dependency all services are one: any of them will do."""

    need = Need.SAMPLING

    def __init__(self, message: str) -> None:
        InfrastructureFailure.__init__(self, message, dependency=INFERENCE)


class ServiceUnreachable(_ServiceFailed):
    """No complete answer: connection refused or broken, or the service says it is not ready.

    Generation changes nothing but a cache, so the same request may be sent elsewhere.
    """


class KeyRefused(ServiceUnreachable):
    """The service wants another key than ours. It may be given one: keys are rotated."""


class RequestTimedOut(_ServiceFailed):
    """The service is reachable, but its answer did not come, or did not go on, in time."""


class RequestRejected(InferenceError):
    """The service (or the client before sending) refused the request; repeating it will not help.

    `status` is the HTTP status, or None when the client refused to send it.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PromptTooLong(RequestRejected):
    """The prompt leaves no room for an answer in the service's context: nothing was generated."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; SGLang's names, defaults and meanings.

    `temperature` 0 is greedy. `top_k` -1 keeps the whole vocabulary. Penalties are added to
    (presence, frequency) or divide (repetition) the logits of tokens seen before.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def to_json(self) -> dict[str, object]:
        """The `sampling_params` object of `/generate`, without what is at its default."""
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
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.presence_penalty != 0.0:
            body["presence_penalty"] = self.presence_penalty
        if self.frequency_penalty != 0.0:
            body["frequency_penalty"] = self.frequency_penalty
        if self.repetition_penalty != 1.0:
            body["repetition_penalty"] = self.repetition_penalty
        return body


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One token prompt.

    `rid` names it for `abort`. It must be unique, also for some seconds after the end of a request:
    SGLang looks 2 s after the end of a stream whether its request still runs, and aborts it then.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling_params: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to a `GenerateRequest`, as everything that follows holds it.

    `output_ids` keeps the stop token that ended it. `output_logprobs[i]` is the logprob of
    `output_ids[i]` under log_softmax(logits / temperature), whatever top_p, top_k and min_p cut
    away. `versions` cover the output without gaps. An aborted generation keeps what it had.
    `service` is the URL of the service that made it, or the last piece of it. `cached_tokens` of
    the `prompt_tokens` were not computed again. `latency_s` runs from the request to the end.

    The columns are tuples of Python numbers: nobody can change them, and tokenizers, chat templates
    and stored documents take them as they are. Raises ValueError where they do not fit together.

    A record of three turns as its services answered it; at its other end it is the row that
    `databases/token_tree.py` shows. Policy 5 came in the middle of turn 1. After turn 1 the context
    was rewritten: turn 2 has a prompt that shares only its first 3 tokens with the others, and
    begins a branch. Prompts and tool results get mask 0, and what is below mask 1.

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

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.output_logprobs):
            raise ValueError(
                f"{len(self.output_ids)} tokens with {len(self.output_logprobs)} logprobs"
            )
        check_spans(self.versions, len(self.output_ids))

    def part(self, begin: int, end: int) -> "Generation":
        """Its tokens `begin` to `end` (half open), as if the service had made only these."""
        return replace(
            self,
            output_ids=self.output_ids[begin:end],
            output_logprobs=self.output_logprobs[begin:end],
            versions=tuple(cut_spans(self.versions, begin, end)),
        )


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """How busy a service is, summed over its data-parallel ranks.

    `used_tokens` of `total_tokens` positions for keys and values are taken. `retractions` counts
    requests that had to give theirs back for lack of room: in SGLang since its last report, so
    that 0 may follow a positive number at once.
    """

    running: int
    waiting: int
    used_tokens: int
    total_tokens: int
    retractions: int


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a service's model accepts; None where it is not known and so not checked."""

    vocab_size: int | None = None
    context_length: int | None = None


UNKNOWN_LIMITS = ModelLimits()


def version_to_wire(version: int) -> str:
    """A policy version as the `weight_version` string of SGLang's API."""
    return _FRESH_WIRE if version == FRESH_VERSION else str(version)


def version_from_wire(version: str) -> int:
    """The policy version of a `weight_version` string.

    Raises ValueError when it is neither a decimal number nor "default".
    """
    if version == _FRESH_WIRE:
        return FRESH_VERSION
    if not version.isdecimal():
        raise ValueError(
            f"weight version {version!r} is not one that this project published: start the service"
            " without --weight-version, or with a decimal number"
        )
    return int(version)
