"""The figures of a sampler: those of its ledger, its breakers and its services."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from exposed_samples import Samples
from scripted_run import ScriptedAgent, add, begin_run, completed, config, scheduler, until

from agentrl.databases.arrays import unpack_ints
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    SlotStatus,
    ToolCall,
)
from agentrl.databases.turn_counts import NO_TOOL, OTHER_TOOLS, TurnCounts
from agentrl.failures import InfrastructureFailure
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.scheduling.sampler_figures import SamplerFigures
from agentrl.rollout.scheduling.scheduler import SamplingScheduler

SQL = "the tool server sql"


class FailsOnce(ScriptedAgent):
    """Its first attempts at the rollouts with number 0 fail."""

    async def run(self) -> Record:
        if self.claim.rollout == 0 and self.record.attempt == 0:
            raise LookupError("the agent has a bug")
        return await super().run()


class NeedsTool(ScriptedAgent):
    """Meets an outage of its tools while `out` is set. The tools answer their probe afterwards."""

    out = True

    async def run(self) -> Record:
        if type(self).out:
            failure = InfrastructureFailure("no route", dependency=SQL, probe=self.probe)
            raise failure
        return await super().run()

    @classmethod
    async def probe(cls) -> None:
        if cls.out:
            raise ConnectionError("no route")


@asynccontextmanager
async def sampling(
    database: RunDatabase, agent: type[AsyncSampler]
) -> AsyncIterator[tuple[SamplingScheduler, SamplerFigures]]:
    async with scheduler(
        database, agent, config("--lease_seconds", "600", "--drain_seconds", "0")
    ) as sampler:
        shared = sampler.agents.shared
        running = asyncio.create_task(sampler.run())
        yield sampler, SamplerFigures(sampler, shared.pool, shared.records)
        sampler.stop()
        await asyncio.wait_for(running, 20)


async def test_attempts_turns_and_tokens_are_those_of_the_ledger(database: RunDatabase) -> None:
    await add(database, 3)
    await begin_run(database)
    async with sampling(database, FailsOnce) as (sampler, figures):
        before = Samples.of(figures)
        assert before("agentrl_generated_tokens_total") == 0
        assert before("agentrl_attempt_age_seconds", of="oldest") == 0
        await until(completed(database, 3))
        await until(lambda: _idle(sampler))
        after = Samples.of(figures)

    failed = await database.records.count_documents({"status": RecordStatus.FAILED})
    assert failed == 3
    ends = {"sampled": 6, "scored": 6, "failed": failed}
    assert after.by("agentrl_attempt_events_total", "event") == ends
    assert after.by("agentrl_trajectories_total", "stop_reason") == {"answered": 6}
    turns = [turn async for turn in database.turns.find()]
    assert after.by("agentrl_turns_total", "status") == {"completed": len(turns)}
    generated = sum(len(unpack_ints(turn["output_ids"])) for turn in turns)
    assert after("agentrl_generated_tokens_total") == generated == 18
    prompts = sum(turn["prompt_len"] for turn in turns)
    assert after("agentrl_prompt_tokens_total") == prompts > 0
    assert after("agentrl_attempts", step="sample") == after("agentrl_leases") == 0
    assert "agentrl_lease_remaining_seconds" not in after.names  # there is none


async def _idle(sampler: SamplingScheduler) -> bool:
    return not sampler.attempts


async def test_attempts_in_progress_are_the_leases_of_the_ledger(database: RunDatabase) -> None:
    class Slow(ScriptedAgent):
        pause_s = 600.0

    await add(database, 2)
    await begin_run(database, service="http://127.0.0.1:1")
    async with sampling(database, Slow) as (sampler, figures):
        leased = {"slots.status": SlotStatus.LEASED}
        await until(lambda: _count(database, leased, 2))
        await until(lambda: _has_begun(sampler, 4))
        now = Samples.of(figures)
        assert now("agentrl_attempts", step="sample") == now("agentrl_leases") == 4
        assert now("agentrl_attempt_limit") == sampler.limit >= 4
        oldest = now("agentrl_attempt_age_seconds", of="oldest")
        assert 0 < now("agentrl_attempt_age_seconds", of="median") <= oldest < 60
        assert 500 < now("agentrl_lease_remaining_seconds") < 600
        assert now("agentrl_service_up", service="http://127.0.0.1:1") == 1


async def _count(database: RunDatabase, wanted: dict[str, str], number: int) -> bool:
    return await database.tasks.count_documents(wanted) == number


async def _has_begun(sampler: SamplingScheduler, number: int) -> bool:
    return len(sampler.attempts) == number


async def test_a_breaker_is_open_while_its_tool_is_out_and_closed_afterwards(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.scheduling.breaker.LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(NeedsTool, "out", True)
    await add(database, 2)
    await begin_run(database)
    async with sampling(database, NeedsTool) as (sampler, figures):
        assert Samples.of(figures).by("agentrl_breaker_open", "dependency") == {}

        async def is_open() -> bool:
            return any(breaker.is_open for breaker in sampler.breakers)

        await until(is_open)
        out = Samples.of(figures)
        assert out("agentrl_breaker_open", dependency=SQL) == 1
        assert 0 <= out("agentrl_breaker_open_seconds", dependency=SQL) < 20
        NeedsTool.out = False
        await until(completed(database, 2))
        again = Samples.of(figures)
    tasks = [task async for task in database.tasks.find()]
    outages = sum(slot["outages"] for task in tasks for slot in task["slots"])
    assert again("agentrl_attempt_events_total", event="outage") == outages >= 1
    assert again("agentrl_breaker_open", dependency=SQL) == 0
    assert "agentrl_breaker_open_seconds" not in again.names
    assert again("agentrl_attempt_events_total", event="scored") == 4


async def test_names_of_tools_that_a_model_invents_are_counted_together(
    database: RunDatabase,
) -> None:
    await add(database, 1, rollouts=1)
    await begin_run(database)
    async with sampling(database, ScriptedAgent):
        await until(completed(database, 1))
    stored = await database.turns.find_one()
    turn = DispatchedSamplingTask.from_mongo(stored)
    names = [*(f"tool {number}" for number in range(70)), "", "tool 0"]
    calls = [
        ToolCall(name=name, arguments={}, is_error=name == "tool 1", latency_s=0.5)
        for name in names
    ]
    counts = TurnCounts()
    counts.add(turn.model_copy(update={"tool_calls": calls}))
    assert counts.tool_calls["tool 0", "ok"] == 2
    assert counts.tool_calls["tool 1", "error"] == 1
    assert counts.tool_calls[OTHER_TOOLS, "ok"] == 7  # 64 have names, and the one without is late
    assert counts.tool_seconds["tool 0"] == 1.0 and NO_TOOL not in counts.tool_seconds
    counts.add(turn.model_copy(update={"replayed": turn.id}))
    assert counts.replayed == 1 and counts.generated_tokens == 3  # of the first alone
