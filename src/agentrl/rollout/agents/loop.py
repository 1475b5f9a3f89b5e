"""Agent loops: classes with `run(sampling_params, **fields)` that return tokens, as verl's do.

    class Loop:
        def __init__(self, server_manager, tokenizer): ...

        async def run(self, sampling_params, **fields):
            output = await self.server_manager.generate(
                request_id=..., prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            ...
            return Output(prompt_ids=..., response_ids=..., response_mask=...)

A loop builds its conversation as tokens, and marks the generated ones in `response_mask`. Its model
calls go through the run's services, which give logprobs and policy versions, so `response_logprobs`
is not needed. The returned tokens are checked against the calls (`loop_tokens.py`) and form the
record.
"""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentrl.databases.documents import Record, StopReason
from agentrl.databases.tasks import Claim
from agentrl.inference.protocol import Generation
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.base import AsyncSampler, SamplerResources
from agentrl.rollout.agents.limits import LimitReached
from agentrl.rollout.agents.loop_given import (
    ServerManager,
    TokenOutput,
    check_constructor,
    constructor_arguments,
    run_fields,
)
from agentrl.rollout.agents.loop_tokens import GeneratedSpan, generated_spans
from agentrl.rollout.agents.turn import Turn

REWARD_SCORE = "reward_score"  # key of the loop's own score in its Record's `scores`


@dataclass(frozen=True)
class LoopResources(SamplerResources):
    """Resources of agent loops. `tokenizer`: a copy for loops, which may change its settings."""

    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class _Call:
    """A model call of the loop, or the part of one that the loop returned."""

    prompt_ids: tuple[int, ...]
    answer: Generation
    stop_reason: StopReason | None  # the limit that truncated the answer

    @property
    def output_ids(self) -> tuple[int, ...]:
        return self.answer.output_ids


class LoopSampler(AsyncSampler):
    """An attempt by an agent loop."""

    loop: ClassVar[type[Any]]
    resources: LoopResources

    @classmethod
    def of(cls, loop: type[Any]) -> type[Self]:
        """A sampler class that runs `loop`. Raises ValueError as `check_constructor` does."""
        check_constructor(loop)
        return type(loop.__name__, (cls,), {"loop": loop, "__doc__": loop.__doc__})

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        super().__init__(claim, record, resources)
        self._calls: list[_Call] = []

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[LoopResources]:
        """Load the tokenizer for loops."""
        tokenizer = AutoTokenizer.from_pretrained(shared.config.model.model_name_or_path)
        yield LoopResources(**vars(shared), tokenizer=tokenizer)

    async def run(self) -> Record:
        """Run the loop and store the tokens that it returns as turns of the record.

        If it fails or reaches a limit, its model calls are stored instead.
        """
        config = self.resources.config
        manager = ServerManager(self._ask, config.sampling_params)
        loop = self.loop(
            **constructor_arguments(self.loop, config, manager, self.resources.tokenizer)
        )
        fields = run_fields(self.loop, self.claim.task, self.opening_messages())
        try:
            output = await loop.run(dict(config.sampling_params), **fields)
            returned = self._returned(output)
        except LimitReached as limit:
            self.record.stop_reason = limit.stop_reason
            await self._store(self._calls)
            return self.record
        except BaseException:
            await self._store(self._calls)
            raise
        *_, last = await self._store(returned)
        self.record.stop_reason = last.stop_reason or StopReason.ANSWERED
        if last.stop_reason is None:
            answer = self.resources.renderer.said(last.text)
            self.record.final_answer = extract_answer(answer, self.answer_schema)
        reward = _reward_score(output)
        if reward is not None:
            self.record.scores[REWARD_SCORE] = reward
        return self.record

    async def evaluate_record(self, record: Record) -> Record | float:
        """The loop's own `reward_score` if it gave one, else the score of the task's scorer."""
        reward = record.scores.get(REWARD_SCORE)
        if reward is None:
            return await super().evaluate_record(record)
        return record.model_copy(update={"score": reward})

    async def _ask(self, prompt_ids: Sequence[int], max_new_tokens: int | None) -> TokenOutput:
        left = self.limits.room(self._n_asked, len(prompt_ids))
        answer, stop_reason = await self.ask(prompt_ids, left, max_new_tokens)
        self._calls.append(_Call(tuple(prompt_ids), answer, stop_reason))
        return TokenOutput(
            token_ids=list(answer.output_ids),
            log_probs=list(answer.output_logprobs),
            stop_reason="length" if answer.finish_reason == "length" else "completed",
        )

    def _returned(self, output: object) -> list[_Call]:
        """The loop's output as model calls.

        Raises ValueError if tokens that the mask marks were not sampled.
        """
        prompt_ids, response_ids, mask = (
            [int(value) for value in _read(output, name)]
            for name in ("prompt_ids", "response_ids", "response_mask")
        )
        whole = (*prompt_ids, *response_ids)
        spans = generated_spans(prompt_ids, response_ids, mask, self._calls)
        return [self._kept(whole[: span.start], span) for span in spans]

    def _kept(self, prompt_ids: tuple[int, ...], span: GeneratedSpan) -> _Call:
        """The part of a call's answer in a span, as the answer to `prompt_ids`."""
        call = self._calls[span.call]
        part = call.answer.part(span.offset, span.offset + span.end - span.start)
        return _Call(prompt_ids, part, call.stop_reason)

    async def _store(self, calls: Sequence[_Call]) -> list[Turn]:
        """Add and store model calls as turns."""
        turns = [
            self.add_answer(call.prompt_ids, call.answer, call.stop_reason, None) for call in calls
        ]
        for number, turn in enumerate(turns):
            await self.write_turn(turn, [] if number else self.opening_messages())
        return turns


def _read(output: object, name: str) -> Any:
    """A field of a loop's output, which is an object or a mapping. Raises ValueError if missing."""
    try:
        return output[name] if isinstance(output, Mapping) else getattr(output, name)
    except (KeyError, AttributeError):
        raise ValueError(f"the agent loop returned no {name}, but {str(output)[:200]!r}") from None


def _reward_score(output: object) -> float | None:
    """The loop's own score, if it gave one. Raises ValueError if it is not finite."""
    if isinstance(output, Mapping):
        score = output.get(REWARD_SCORE)
    else:
        score = getattr(output, REWARD_SCORE, None)
    if score is None:
        return None
    if not math.isfinite(score):
        raise ValueError(f"the agent loop returned {REWARD_SCORE} {score}, not a finite number")
    return float(score)
