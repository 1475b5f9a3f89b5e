"""The engine without HTTP: a model, its scheduler, and the asyncio loop that steps it.

Everything runs in the event loop's thread. A step blocks it for one forward pass and then yields:
on few cores a second thread would only compete for the interpreter.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from torch import Tensor

from agentrl.inference.engine.config import EngineConfig
from agentrl.inference.engine.http_api import PromptLimits, PromptRequest, RequestError
from agentrl.inference.engine.model_runner import ModelRunner
from agentrl.inference.engine.request import LiveRequest
from agentrl.inference.engine.scheduler import PauseMode, Scheduler
from agentrl.inference.engine.text import Text
from agentrl.inference.engine.weights import CacheNotFlushed, copy_weights

# Iterations of the event loop between two steps, enough for a request to get from its socket to
# the scheduler.
_TURNS_PER_STEP = 4
_RATE_WINDOW_S = 1.0


class LocalEngine:
    """A served model. The constructor loads it; `run` must be running to generate."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model_path = config.model_path
        self.runner = ModelRunner(config)
        self.text = Text(config.model_path)
        eos = self.text.eos_token_id
        self.limits = PromptLimits(
            vocab_size=self.runner.vocab_size,
            context_length=self.runner.context_length,
            end_ids=self.runner.end_ids | ({eos} if eos is not None else set()),
        )
        self.scheduler = Scheduler(
            self.runner,
            max_running=config.max_running_requests,
            max_prefill_tokens=config.max_prefill_tokens,
            version=config.weight_version,
            seed=config.seed,
        )
        self.tokens_per_second = 0.0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._updating = asyncio.Lock()
        self._released = False

    async def run(self) -> None:
        """Step for ever, while there is work. An exception of a step ends the engine."""
        marked, marked_tokens = time.monotonic(), 0
        while True:
            if not self.scheduler.has_work:
                self._drained.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            self.scheduler.step()
            if self.scheduler.drained:
                self._drained.set()
            now, tokens = time.monotonic(), self.scheduler.counters.generated_tokens
            if now - marked >= _RATE_WINDOW_S:
                self.tokens_per_second = (tokens - marked_tokens) / (now - marked)
                marked, marked_tokens = now, tokens
            for _ in range(_TURNS_PER_STEP):
                await asyncio.sleep(0)

    async def generate(self, prompts: Sequence[PromptRequest]) -> list[LiveRequest]:
        """Generate for all prompts of one body. Cancellation aborts all of them.

        Raises RequestError if a rid is in use; then nothing is generated.
        """
        self._check_rids(prompts)
        loop = asyncio.get_running_loop()
        ended: list[asyncio.Future[LiveRequest]] = [loop.create_future() for _ in prompts]
        for prompt, future in zip(prompts, ended, strict=True):
            self.scheduler.submit(_live(prompt, partial(_resolve, future)))
        self._wake.set()
        try:
            return [await future for future in ended]
        except asyncio.CancelledError:
            for prompt in prompts:
                self.scheduler.abort(prompt.rid)
            raise

    async def stream(self, prompt: PromptRequest) -> AsyncGenerator[LiveRequest]:
        """Generate for a prompt. Yields the request after each `stream_interval` tokens and at
        its end.

        Closing the iterator early aborts the request. Raises RequestError if the rid is in use.
        """
        self._check_rids([prompt])
        changed = asyncio.Event()
        request = _live(prompt, lambda _: changed.set(), changed.set)
        self.scheduler.submit(request)
        self._wake.set()
        try:
            ended = False
            while not ended:
                await changed.wait()
                changed.clear()
                # Read before the yield: the request may end while its progress is sent.
                ended = request.finish is not None
                yield request
        finally:
            if request.finish is None:
                self.scheduler.abort(prompt.rid)

    def _check_rids(self, prompts: Sequence[PromptRequest]) -> None:
        seen: set[str] = set()
        for prompt in prompts:
            if self.scheduler.is_live(prompt.rid) or prompt.rid in seen:
                raise RequestError(f"Duplicate request ID detected: {prompt.rid}")
            seen.add(prompt.rid)

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. It takes effect at once, because steps run in the same thread."""
        self.scheduler.pause(mode)
        self._wake.set()

    def resume(self) -> None:
        """Continue after `pause`. Raises RequestError while the memory is released."""
        if self._released:
            raise RequestError("continue_generation: the memory was released, resume it first")
        self.scheduler.resume()
        self._wake.set()

    def release_memory(self) -> None:
        """Release the device's memory. Raises RequestError unless paused and without requests."""
        if self._released or self.scheduler.paused is None or not self.scheduler.flush_cache():
            raise RequestError(
                "release_memory_occupation: the engine must be paused, without requests that hold"
                " keys and values, and have its memory"
            )
        self.runner.release_memory()
        self._released = True

    def resume_memory(self) -> None:
        """Take the memory again. Raises RequestError if it was not released."""
        if not self._released:
            raise RequestError("resume_memory_occupation: the memory was not released")
        self.runner.resume_memory()
        self._released = False

    async def update_weights(
        self,
        read: Callable[[], dict[str, Tensor]],
        version: str | None,
        *,
        flush_cache: bool,
        abort_all: bool = False,
    ) -> str:
        """Replace the model's tensors by those that `read` returns. Returns SGLang's message.

        `read` is called in a thread, never two at once, and a cancelled update changes nothing.
        While the engine is paused the update happens at once; otherwise present requests end first
        and later ones wait. Raises the WeightsError of `read` before anything changed, or
        CacheNotFlushed after the update.
        """
        async with self._updating:
            tensors = await _in_thread(read)
            if abort_all:
                self.scheduler.abort()
            self.scheduler.hold_back()
            try:
                while self.scheduler.paused is None and not self.scheduler.drained:
                    self._drained.clear()
                    self._wake.set()
                    await self._drained.wait()
                copy_weights(self.runner.model, tensors)
                self.scheduler.weights_changed(version or self.scheduler.version)
                flushed = not flush_cache or self.scheduler.flush_cache()
            finally:
                self.scheduler.let_in()
                self._wake.set()
        if not flushed:
            raise CacheNotFlushed(
                "Weights were updated, but the cache was not flushed because requests are still"
                " running or queued. Retract or finish them, then call /flush_cache."
            )
        return f" Weight version updated to {version}." if version is not None else ""


async def _in_thread(read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The result of `read`. A thread cannot be cancelled: a cancellation waits for its end."""
    reading = asyncio.create_task(asyncio.to_thread(read))
    cancelled: asyncio.CancelledError | None = None
    while not reading.done():
        try:
            await asyncio.wait({reading})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        reading.exception()  # nobody is left to be told
        raise cancelled
    return reading.result()


def _live(
    prompt: PromptRequest,
    on_finish: Callable[[LiveRequest], None],
    on_progress: Callable[[], None] | None = None,
) -> LiveRequest:
    return LiveRequest(
        rid=prompt.rid,
        prompt_ids=prompt.input_ids,
        sampling=prompt.sampling,
        max_new_tokens=prompt.max_new_tokens,
        end_ids=prompt.end_ids,
        stop_strings=prompt.stop_strings,
        on_finish=on_finish,
        on_progress=on_progress,
        stream_interval=prompt.stream_interval,
    )


def _resolve(waiter: asyncio.Future[LiveRequest], request: LiveRequest) -> None:
    """Set the result of a future, unless it was cancelled."""
    if not waiter.done():
        waiter.set_result(request)
