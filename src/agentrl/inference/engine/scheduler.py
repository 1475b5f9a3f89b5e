"""Continuous batching: selects the requests of each step and applies its tokens to them.

Requests join and leave between any two steps. Synchronous and single-threaded: `engine` calls
`step` in a loop and all other methods between two steps.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from agentrl.inference.engine.kv_cache import PrefillChunk
from agentrl.inference.engine.model_runner import ModelRunner
from agentrl.inference.engine.request import Finish, LiveRequest
from agentrl.inference.engine.sampling import edit_logits, sample, seeded_uniform
from agentrl.inference.engine.slots import SlotTable

# A request that waits for a prefix is compared with all slots for nothing. A step passes over so
# many steps' worth of prompt tokens, at most.
_PASSED_OVER = 8

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: dict[str, PauseMode] = {mode: mode for mode in get_args(PauseMode)}


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0  # that have ended
    steps: int = 0


class Scheduler:
    """The requests of one model, from their arrival to their end.

    A request waits (first come, first served), prefills, in chunks if it is long, and decodes.
    Retraction returns it to the head of the queue with the tokens that it has.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_running: int,
        max_prefill_tokens: int,
        version: str,
        seed: int,
    ) -> None:
        self.version = version
        self.counters = Counters()
        self.paused: PauseMode | None = None
        self._runner = runner
        self._max_running = min(max_running, runner.num_slots)
        self._max_prefill_tokens = max_prefill_tokens
        self._slots = SlotTable(runner.num_slots, runner.context_length)
        self._generator = torch.Generator().manual_seed(seed)
        self._epoch = 0
        self._live: dict[str, LiveRequest] = {}
        self._waiting: deque[LiveRequest] = deque()
        self._prefilling: list[LiveRequest] = []
        self._decoding: list[LiveRequest] = []
        # Requests that arrived while a weight update waits for the earlier ones to end.
        self._held: list[LiveRequest] | None = None

    @property
    def max_running(self) -> int:
        """Largest number of requests that run at once."""
        return self._max_running

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Number of requests that hold no slot."""
        return len(self._live) - self.running

    @property
    def running_tokens(self) -> int:
        """Number of cached tokens of the running requests."""
        return sum(r.computed for r in (*self._prefilling, *self._decoding))

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self.paused is None and bool(self._waiting or self.running)

    @property
    def drained(self) -> bool:
        """Whether all but held-back requests have ended."""
        return not self._waiting and not self.running

    def is_live(self, rid: str) -> bool:
        """Whether a request with this rid has not ended."""
        return rid in self._live

    def submit(self, request: LiveRequest) -> None:
        """Add a request. Its `on_finish` is called at its end."""
        assert request.rid not in self._live
        if request.max_new_tokens == 0:
            self._end(request, Finish("length"))
            return
        self._live[request.rid] = request
        if self._held is not None:
            self._held.append(request)
        else:
            self._waiting.append(request)

    def abort(self, rid: str | None = None) -> None:
        """End one request, or all if `rid` is None. The tokens so far are kept."""
        chosen = list(self._live.values()) if rid is None else [self._live.get(rid)]
        for request in chosen:
            if request is None:
                continue
            for place in (self._waiting, self._prefilling, self._decoding, self._held or []):
                if request in place:
                    place.remove(request)
            self._give_back_slot(request)
            self._end(request, Finish("abort", message="Aborted"))

    def pause(self, mode: PauseMode) -> None:
        """Take no further step until `resume`."""
        self.paused = mode
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            running = self._decoding + self._prefilling
            self._decoding, self._prefilling = [], []
            running.sort(key=lambda request: request.arrived)
            for request in running:
                self._give_back_slot(request)
                request.computed = 0
                request.retractions += 1
            self._waiting.extendleft(reversed(running))

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = None

    def hold_back(self) -> None:
        """Keep requests that arrive from now on waiting until `let_in`."""
        if self._held is None:
            self._held = []

    def let_in(self) -> None:
        """End `hold_back`."""
        if self._held is not None:
            self._waiting.extend(self._held)
            self._held = None

    def flush_cache(self) -> bool:
        """Forget cached prefixes. Returns False, without effect, while requests run or wait.

        Requests that wait because of a pause hold nothing in the cache and do not count.
        """
        if self.running or (self._waiting and self.paused is None):
            return False
        self._slots.clear()
        return True

    def weights_changed(self, version: str) -> None:
        """Record new weights. Earlier keys and values are not reused for other requests."""
        self.version = version
        self._epoch += 1
        self._slots.clear()
        for request in (*self._prefilling, *self._decoding):
            request.use_weights(version)

    def step(self) -> None:
        """Run one forward pass: one token per decoding request, and chunks of prompts."""
        self._admit()
        # Rows move first, because the plan refers to them by number.
        self._compact()
        segments, chunks = self._plan_prefill()
        decoding = self._decoding
        logits = self._runner.step(
            [request.output_ids[-1] for request in decoding],
            [request.total - 1 for request in decoding],
            segments,
            chunks,
            [s.end == r.total for s, r in zip(segments, self._prefilling, strict=False)],
        )
        for request in decoding:
            request.computed += 1
        still: list[LiveRequest] = []
        joined: list[LiveRequest] = []
        for index, request in enumerate(self._prefilling):
            if index < len(segments):
                request.computed = segments[index].end
            if request.computed == request.total:
                assert request.slot is not None
                self._slots.computed(request.slot)
                joined.append(request)
            else:
                still.append(request)
        self._prefilling = still
        self._decoding = decoding + joined
        self.counters.steps += 1
        if self._decoding:
            self._sample(logits)

    def _admit(self) -> None:
        """Give slots to waiting requests, in order, within free slots and the prefill budget.

        Requests that wait for a prefix are passed over, up to a number of tokens: the event loop
        stands still meanwhile.
        """
        budget, patience = self._max_prefill_tokens, _PASSED_OVER * self._max_prefill_tokens
        budget -= sum(request.total - request.computed for request in self._prefilling)
        passed: list[LiveRequest] = []
        while self._waiting and budget > 0 and patience > 0 and self.running < self._max_running:
            request = self._waiting.popleft()
            placement = self._slots.place(request.tokens())
            if placement is None:
                passed.append(request)
                patience -= request.total
                continue
            slot = placement.slot
            if placement.copy_from is not None:
                self._runner.cache.copy_prefix(placement.copy_from.row, slot.row, placement.cached)
            request.slot = slot
            request.computed = placement.cached
            request.epoch = self._epoch
            request.use_weights(self.version)
            if request.cached_tokens is None:
                request.cached_tokens = placement.cached
                self.counters.prompt_tokens += len(request.prompt_ids)
                self.counters.cached_tokens += placement.cached
            budget -= request.total - request.computed
            self._prefilling.append(request)
        self._waiting.extendleft(reversed(passed))

    def _plan_prefill(self) -> tuple[list[PrefillChunk], list[list[int]]]:
        """Chunks of the prefilling requests, in their order, within the budget of one step."""
        budget = self._max_prefill_tokens
        segments: list[PrefillChunk] = []
        chunks: list[list[int]] = []
        for request in self._prefilling:
            if budget <= 0:
                break
            assert request.slot is not None
            end = min(request.total, request.computed + budget)
            segments.append(PrefillChunk(request.slot.row, request.computed, end))
            chunks.append(request.tokens()[request.computed : end])
            budget -= end - request.computed
        return segments, chunks

    @torch.inference_mode()  # as in the forward pass: else its logits must not be edited
    def _sample(self, logits: torch.Tensor) -> None:
        """Draw a token for each decoding request from its row of `logits` [B, V]."""
        requests = self._decoding
        samplings = [request.sampling for request in requests]
        seeded: list[tuple[int, float]] = []
        for row, (request, sampling) in enumerate(zip(requests, samplings, strict=True)):
            if sampling.edits_logits:
                edit_logits(
                    logits[row],
                    sampling,
                    request.prompt_ids,
                    request.output_ids,
                    sorted(request.end_ids),
                )
            if sampling.seed is not None:
                seeded.append((row, seeded_uniform(sampling.seed, len(request.output_ids))))
        tokens, logprobs = sample(logits, samplings, seeded, self._generator)
        self.counters.generated_tokens += len(tokens)
        going: list[LiveRequest] = []
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if request.accept(token, logprob):
                self._give_back_slot(request)
                assert request.finish is not None
                self._end(request, request.finish)
            else:
                request.tell_progress()
                going.append(request)
        self._decoding = going

    def _compact(self) -> None:
        """Move the decoding requests to the first rows, and sort them by row."""
        slots = [request.slot for request in self._decoding if request.slot is not None]
        swaps = self._slots.compact(slots)
        self._decoding.sort(key=_row)
        # After a weight update `filled` leaves out what a prefilling request has computed.
        computed = {_row(request): request.computed for request in self._prefilling}
        for front, back in swaps:
            moved = self._decoding[front].total
            length = max(moved, self._slots.filled(back), computed.get(back, 0))
            self._runner.cache.swap_rows(front, back, length)

    def _give_back_slot(self, request: LiveRequest) -> None:
        if request.slot is None:
            return
        valid = request.tokens()[: request.computed] if request.epoch == self._epoch else []
        self._slots.release(request.slot, valid)
        request.slot = None

    def _end(self, request: LiveRequest, finish: Finish) -> None:
        request.finish = finish
        self._live.pop(request.rid, None)
        self.counters.requests += 1
        request.on_finish(request)


def _row(request: LiveRequest) -> int:
    assert request.slot is not None
    return request.slot.row
