"""Evaluates a model behind an OpenAI-compatible API with a run's tasks, tools and scorers.

The agents `mcp`, `single_turn` and `math` are held as conversations of messages; tools are offered
as OpenAI's. Turns are stored with their texts and calls, and without tokens: they are not trained.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Self, cast

from agentrl.configs import Config
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    StopReason,
    TokenCounts,
    ToolCall,
    TurnStatus,
)
from agentrl.databases.records import RecordLedger, turn_id
from agentrl.databases.tasks import Claim
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents.agent_registry import find_agent
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.base import SamplerResources
from agentrl.rollout.agents.math import MathSampler, math_question, math_schema
from agentrl.rollout.agents.mcp import MCPSampler
from agentrl.rollout.agents.repetition import repeats
from agentrl.rollout.agents.single_turn import SingleTurnSampler
from agentrl.rollout.agents.tool_sampler import MCPResources, ToolSampler
from agentrl.rollout.agents.turn_status import format_error, turn_status
from agentrl.rollout.chat import ChatRenderer, Message
from agentrl.rollout.llm.completion import EndpointCall, EndpointTurn
from agentrl.rollout.llm.endpoint import ChatEndpoint, ContextFull, EndpointUnreachable
from agentrl.rollout.llm.models import AgentModel
from agentrl.rollout.scorers import Scorers
from agentrl.rollout.tool_calls import Call, MalformedCall
from agentrl.rollout.tool_calls.calls import make_call

KINDS = (MCPSampler, SingleTurnSampler)  # agents that an endpoint can stand behind


def can_evaluate(agent: str) -> bool:
    """Whether an agent can be held with an endpoint: one that is built in."""
    return find_agent(agent) in (*KINDS, MathSampler)


@dataclass(frozen=True)
class _SharedResources(SamplerResources):
    endpoint: ChatEndpoint


@dataclass(frozen=True)
class EndpointResources(MCPResources):
    """Resources of samplers that ask an endpoint."""

    endpoint: ChatEndpoint


class NoServices(ServicePool):
    """The pool of a process that asks an endpoint: it stays empty."""

    def update(self, services: object) -> None:
        """Services are not asked."""


class EndpointSampler(ToolSampler):
    """One attempt at one task by a model behind an API."""

    model: ClassVar[AgentModel]
    resources: EndpointResources

    @classmethod
    def of(cls, model: AgentModel) -> type[Self]:
        """A sampler class that asks this model."""
        return type(cls.__name__, (cls,), {"model": model})

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        super().__init__(claim, record, resources)
        self._kind = find_agent(record.agent_name or resources.config.agent.agent_name)
        self._calls_in_view: set[bytes] = set()
        self._n_repeats = 0
        self._n_tokens = 0  # of the last prompt and its answer

    @classmethod
    @asynccontextmanager
    async def open_resources(
        cls, config: Config, pool: ServicePool, records: RecordLedger
    ) -> AsyncIterator[SamplerResources]:
        """Open the scorers and the connection to the endpoint.

        There is no model folder, and so no renderer: nothing here reads it.
        """
        no_renderer, patience_s = cast(ChatRenderer, None), config.sampling.startup_timeout
        params = {**json.loads(config.sampling.preferred_sampling_params), **_penalties(config)}
        async with (
            Scorers.of_run(config, records) as scorers,
            ChatEndpoint(cls.model, params, patience_s) as endpoint,
        ):
            yield _SharedResources(config, pool, no_renderer, records, scorers, endpoint)

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[EndpointResources]:
        """Open the tools."""
        assert isinstance(shared, _SharedResources), "opened by this class"
        fields = {name: value for name, value in vars(shared).items() if name != "endpoint"}
        async with super().extend_resources(SamplerResources(**fields)) as with_tools:
            yield EndpointResources(**vars(with_tools), endpoint=shared.endpoint)

    @property
    def n_turns(self) -> int:
        """Number of turns so far."""
        return self.record.n_turns

    async def converse(self) -> Record:
        """Hold the conversation until the model answers or a limit is reached."""
        schemas = self.resources.tools.schemas if issubclass(self._kind, MCPSampler) else ()
        self.note_tools(schemas)
        added = self._question()
        messages: list[Message] = list(added)
        reason = self._limit()
        while reason is None:
            turn = await self._ask(messages, schemas)
            if isinstance(turn, StopReason):
                reason = turn
                break
            self._count(turn)
            messages.append(_as_message(turn))
            reason, added = await self._respond(turn, added, schemas)
            messages += added
        self.record.stop_reason = reason
        return self.record

    async def _ask(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]
    ) -> EndpointTurn | StopReason:
        if self.outage is not None:
            raise self.outage
        left = self.limits.of_turn(self.limits.tokens_left(self._n_tokens)).max_new_tokens
        try:
            turn = await self.resources.endpoint.complete(messages, schemas, left)
            return _identified(turn, self.record.n_turns)
        except ContextFull:
            return StopReason.MAX_PROMPT_TOKENS
        except EndpointUnreachable as outage:
            # Whoever evaluates is told: the key cannot be used, or nobody mends the outage.
            patience_s = self.resources.config.sampling.startup_timeout
            outage.sampler_waits_s = 0.0 if outage.denied else patience_s
            self.meet_outage(outage)
            raise

    def _count(self, turn: EndpointTurn) -> None:
        counts, before = self.record.tokens, self._n_tokens
        first = self.record.n_turns == 0
        grown = max(0, turn.prompt_tokens - before)
        self.record.tokens = TokenCounts(
            prompt=turn.prompt_tokens if first else counts.prompt,
            generated=counts.generated + turn.completion_tokens,
            observed=counts.observed + (0 if first else grown),
        )
        self._n_tokens = turn.prompt_tokens + turn.completion_tokens
        self.record.n_turns += 1
        self.record.n_segments = 1

    async def _respond(
        self, turn: EndpointTurn, asked: Sequence[Message], schemas: Sequence[dict[str, Any]]
    ) -> tuple[StopReason | None, list[Message]]:
        """Make a turn's calls; returns why the conversation ends, if it does, and the results."""
        calls = [_read(call) for call in turn.calls]
        fault = format_error(calls, schemas)
        cut_off = turn.finish_reason == "length"
        reason = StopReason.MAX_NEW_TOKENS if cut_off else None
        if not calls and not cut_off:
            reason = StopReason.ANSWERED
            self.record.final_answer = extract_answer(turn.content, self._schema())
        reason = reason or self._limit()
        if reason is not None:
            unmade = [
                ToolCall(name=call.name, arguments=call.arguments)
                for call in calls
                if not isinstance(call, MalformedCall)
            ]
            await self._write(turn, asked, unmade, fault)
            return reason, []
        began = time.monotonic()
        made = await asyncio.gather(*map(self.make_call, calls))
        documents = [call.document for call in made]
        self.record.n_tool_calls += len(made)
        self.record.n_tool_errors += sum(document.is_error for document in documents)
        keys = [call.key for call in made]
        repeated = repeats(keys, self._calls_in_view)
        self._calls_in_view.update(keys)
        await self._write(turn, asked, documents, fault, time.monotonic() - began, repeated)
        self._n_repeats += repeated
        if 0 < self.resources.config.context.repetition_early_stop_times <= self._n_repeats:
            return StopReason.REPETITION, []
        results: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "content": document.result or ""}
            for call, document in zip(turn.calls, documents, strict=True)
        ]
        return None, results

    async def _write(
        self,
        turn: EndpointTurn,
        asked: Sequence[Message],
        calls: Sequence[ToolCall],
        fault: str | None,
        tools_latency_s: float = 0.0,
        repeated: bool = False,
    ) -> None:
        number = self.record.n_turns - 1
        status: TurnStatus = turn_status(
            cut_off=turn.finish_reason == "length",
            looped=False,
            malformed=fault is not None,
            repeated=repeated,
            failed=any(call.is_error for call in calls),
        )
        document = text_turn(
            self.record.id, number, turn, self.resources.endpoint.model.base_url, asked, calls
        )
        told = {"status": status, "format_error": fault, "tools_latency_s": tools_latency_s}
        await self.store_turn(document.model_copy(update=told))

    def _limit(self) -> StopReason | None:
        return self.limits.reached(self.record.n_turns, self._n_tokens)

    def _question(self) -> list[Message]:
        opening = self.opening_messages()
        if issubclass(self._kind, MathSampler):
            return math_question(self.claim.task, opening)
        return opening

    def _schema(self) -> str | None:
        task = self.claim.task
        return math_schema(task) if issubclass(self._kind, MathSampler) else self.answer_schema


def text_turn(
    record_id: str,
    number: int,
    turn: EndpointTurn,
    service: str,
    messages: Sequence[Message],
    calls: Sequence[ToolCall],
) -> DispatchedSamplingTask:
    """Turn `number` of a Record as it is stored: with texts and without tokens.

    `messages`: added before it. `calls`: those that it makes.
    """
    thought, now = f"<think>{turn.reasoning}</think>" if turn.reasoning else "", datetime.now(UTC)
    return DispatchedSamplingTask(
        id=turn_id(record_id, number),
        record_id=record_id,
        turn=number,
        segment=0,
        service=service,
        messages=list(messages),
        prompt_delta_ids=b"",
        prompt_len=turn.prompt_tokens,
        output_ids=b"",
        output_logprobs=b"",
        output_text=f"{thought}{turn.content}",
        tool_calls=list(calls),
        finish_reason=turn.finish_reason,
        versions=[],
        cached_tokens=turn.cached_tokens,
        answered_at=turn.answered_at or now,
        generate_latency_s=turn.latency_s,
        created_at=now,
    )


def endpoint_turn(turn: DispatchedSamplingTask) -> EndpointTurn:
    """The answer of an API that a turn of `text_turn` holds."""
    thought, closed, content = turn.output_text.removeprefix("<think>").partition("</think>")
    thinks = turn.output_text.startswith("<think>") and bool(closed)
    return EndpointTurn(
        content=content if thinks else turn.output_text,
        reasoning=thought if thinks else "",
        calls=tuple(
            EndpointCall("", call.name, json.dumps(call.arguments)) for call in turn.tool_calls
        ),
        finish_reason=turn.finish_reason,
        prompt_tokens=turn.prompt_len,
        completion_tokens=0,
        cached_tokens=turn.cached_tokens,
        latency_s=turn.generate_latency_s,
    )


def _penalties(config: Config) -> dict[str, float]:
    names = ("presence_penalty", "frequency_penalty")
    return {name: value for name in names if (value := getattr(config.sampling, name))}


def _identified(turn: EndpointTurn, number: int) -> EndpointTurn:
    """The turn with an id for each call, by which its result is sent: its own if it has one."""
    ids = [call.id for call in turn.calls]
    calls = (
        replace(call, id=f"call_{number}_{place}")
        if not call.id or call.id in ids[:place]
        else call
        for place, call in enumerate(turn.calls)
    )
    return replace(turn, calls=tuple(calls))


def _read(call: EndpointCall) -> Call:
    if call.fault is not None:
        return MalformedCall(call.fault)
    try:
        return make_call(call.name, json.loads(call.arguments or "{}"))
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the arguments of the call of {call.name} are not JSON ({error})")


def _as_message(turn: EndpointTurn) -> Message:
    """The turn as the API reads it again."""
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                # An API may refuse a call without a name, or without arguments.
                "function": {"name": call.name or "unknown", "arguments": call.arguments or "{}"},
            }
            for call in turn.calls
        ]
    return message
