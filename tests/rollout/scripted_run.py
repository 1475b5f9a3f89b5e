"""A run without a model: an agent of the tests' own under the real scheduler, on a real mongod.

Here is what its tests share; `sampler_process.py` runs it as a process of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.configs import Config, parse_config
from agentrl.databases import runs, services
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, Split, StopReason, Task, TaskStatus
from agentrl.databases.feeder import make_tasks
from agentrl.databases.records import RecordLedger
from agentrl.databases.runs import RunLease
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import Claim, TaskLedger
from agentrl.inference.pool import ServicePool
from agentrl.inference.protocol import Generation
from agentrl.policy_version import VersionSpan
from agentrl.rollout.agents.base import AsyncSampler, SamplerResources, Turn, load_renderer
from agentrl.rollout.agents.process import Agents
from agentrl.rollout.scheduling.scheduler import SamplingScheduler
from agentrl.rollout.scorers import Scorers

DEMO_MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"
Script = Callable[[Claim], float]  # the score of an attempt; may raise


class ScriptedAgent(AsyncSampler):
    """An agent that says one fixed turn and gets the score of its script, which it keeps for its
    scoring."""

    script: Script = staticmethod(lambda claim: 0.0)
    pause_s = 0.0
    version = 0  # of the weights that say it

    async def run(self) -> Record:
        """One turn, said after a pause."""
        await self.say()
        self.record.stop_reason = StopReason.ANSWERED
        self.record.scores["script"] = type(self).script(self.claim)
        return self.record

    async def say(self) -> None:
        """A turn of three tokens."""
        await self.begin_conversation([{"role": "user", "content": self.record.query}], None)
        made = Generation(
            output_ids=(5, 6, self.resources.renderer.turn_end_id),
            output_logprobs=(-1.0, -2.0, -0.5), finish_reason="stop",
            versions=(VersionSpan(type(self).version, 0, 3),), prompt_tokens=len(self.context.ids),
            cached_tokens=0, latency_s=0.0, service="none",
        )  # fmt: skip
        tokens = self.context.add_turn(made.output_ids, made.output_logprobs, made.versions)
        await asyncio.sleep(self.pause_s)
        turn = Turn(made, "said", None, tokens)
        await self.write_turn(turn, [])
        self.record.versions = self.context.versions

    async def evaluate_record(self, record: Record) -> Record:
        """The script's score."""
        return record.model_copy(update={"score": record.scores["script"]})


def agent(script: Script, pause_s: float = 0.0) -> type[ScriptedAgent]:
    return type("Agent", (ScriptedAgent,), {"script": staticmethod(script), "pause_s": pause_s})


def config(*flags: str) -> Config:
    return parse_config(
        ["--model_name_or_path", str(DEMO_MODEL), "--num_generations", "2", "--max_failures", "2",
         "--lease_seconds", "5", *flags]
    )  # fmt: skip


@asynccontextmanager
async def scheduler(
    database: RunDatabase,
    agent: type[AsyncSampler],
    config: Config,
    evaluation: int | None = None,
    owner: str = "sampler",
) -> AsyncIterator[SamplingScheduler]:
    records = RecordLedger(database, config.sampling.lease_seconds)
    async with ServicePool() as pool, Scorers.of_run(config, records) as scorers:
        resources = SamplerResources(config, pool, load_renderer(config), records, scorers)
        async with Agents(resources, agent) as agents:
            yield SamplingScheduler(database, config, agents, owner, evaluation)


async def add(
    database: RunDatabase,
    n: int,
    split: Split = Split.TRAIN,
    epoch: int = 0,
    rollouts: int = 2,
    scorer: str = "exact_match",
) -> None:
    lines = [TaskLine(id=f"{split}{i}", query=f"q{i}", scorer=scorer) for i in range(n)]
    ledger = TaskLedger(database, "feeder", lease_seconds=9, max_failures=1)
    await ledger.add(make_tasks(lines, split, epoch, rollouts, range(n)))


async def begin_run(
    database: RunDatabase, rows_per_step: int = 1000, service: str = "http://127.0.0.1:1"
) -> RunLease:
    """What a trainer does first: the run is its own, and a service has its weights."""
    lease = RunLease(database, "trainer", "here", lease_seconds=60)
    await lease.acquire(rows_per_step)
    await lease.progress(step=0, max_steps=9, version=0, status=runs.TRAINING)
    await services.register_urls(database, [service])
    await services.acknowledge(database, service, 0)
    return lease


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until an async condition holds."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def all_tasks(database: RunDatabase) -> list[Task]:
    return [Task.from_mongo(task) async for task in database.tasks.find().sort("seq", 1)]


def completed(database: RunDatabase, n: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return await database.tasks.count_documents({"status": TaskStatus.COMPLETED}) == n

    return condition
