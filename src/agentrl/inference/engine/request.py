"""One live request of the engine: its tokens, their weight versions, and its end.

The state of a request (waiting, prefilling, decoding) is the scheduler's list that contains it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.inference.engine.sampling import TokenSampling
from agentrl.inference.engine.slots import CacheSlot
from agentrl.inference.engine.text import StopStrings


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended: "stop" (with `matched`), "length", or "abort" (with `message`)."""

    kind: str
    matched: int | str | None = None
    message: str | None = None


@dataclass(slots=True)
class VersionStart:
    """Output tokens from `start` on, up to the next span, were sampled by weights `version`."""

    version: str
    start: int


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from its arrival to its end.

    slot: holds the keys and values of the first `computed` tokens of prompt and output
    epoch: number of weight updates before these were computed; after another update no other
        request may reuse them
    on_finish: called once, when `finish` is set
    on_progress: called with the first token and then after each `stream_interval` further ones
    told: number of output tokens at the last call of `on_progress`
    """

    rid: str
    prompt_ids: list[int]
    sampling: TokenSampling
    max_new_tokens: int
    end_ids: frozenset[int]
    on_finish: Callable[["LiveRequest"], None]
    stop_strings: StopStrings | None = None
    on_progress: Callable[[], None] | None = None
    stream_interval: int = 1
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    spans: list[VersionStart] = field(default_factory=list)
    slot: CacheSlot | None = None
    computed: int = 0
    epoch: int = 0
    cached_tokens: int | None = None
    retractions: int = 0
    finish: Finish | None = None
    told: int = 0
    arrived: float = field(default_factory=time.monotonic)

    @property
    def total(self) -> int:
        """Number of tokens, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_ids + self.output_ids

    @property
    def newest_version(self) -> str | None:
        """Version of the weights that sampled the last token; None without output."""
        made = [span.version for span in self.spans if span.start < len(self.output_ids)]
        return made[-1] if made else None

    def use_weights(self, version: str) -> None:
        """Record that weights `version` sample all further tokens."""
        start = len(self.output_ids)
        if self.spans and self.spans[-1].start == start:
            self.spans.pop()
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(VersionStart(version, start))

    def accept(self, token: int, logprob: float) -> bool:
        """Append a sampled token. Returns whether it ends the request.

        As in SGLang the length is checked first: a stop token at the last allowed position ends
        the request by "length".
        """
        self.output_ids.append(token)
        self.output_logprobs.append(logprob)
        if len(self.output_ids) >= self.max_new_tokens:
            self.finish = Finish("length")
        elif token in self.end_ids:
            self.finish = Finish("stop", matched=token)
        elif self.stop_strings is not None:
            matched = self.stop_strings.match(self.output_ids)
            if matched is not None:
                self.finish = Finish("stop", matched=matched)
        return self.finish is not None

    def tell_progress(self) -> None:
        """Call `on_progress` if `stream_interval` tokens have come since its last call."""
        count = len(self.output_ids)
        if self.on_progress is not None and (
            not self.told or count - self.told >= self.stream_interval
        ):
            self.told = count
            self.on_progress()
