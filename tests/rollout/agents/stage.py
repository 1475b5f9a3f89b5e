"""A stage for agents: attempts at tasks with a real database, tools and a service over HTTP."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from answering_service import AnsweringService

from agentrl.configs import Config, parse_config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DispatchedSamplingTask, Record, Slot, Split, Task
from agentrl.databases.records import RecordLedger, new_record
from agentrl.databases.tasks import Claim
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents.agent_registry import find_agent
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.chat import ChatRenderer

DEMO_MODEL = Path(__file__).resolve().parents[3] / "assets" / "demo" / "model"
END = "<|im_end|>"


@dataclass
class Stage:
    """Runs attempts. `lines`: what the model says, in order; or `answer` says it to each prompt."""

    database: RunDatabase
    renderer: ChatRenderer
    mcp_url: str
    lines: list[str] = field(default_factory=list)
    service: AnsweringService = field(init=False)
    flags: tuple[str, ...] = ()
    _n_attempts: int = 0

    def __post_init__(self) -> None:
        self.service = AnsweringService(self.renderer, self._say)

    async def _say(self, prompt: str) -> str:
        return self.lines.pop(0) + END

    @property
    def config(self) -> Config:
        return parse_config(
            ["--model_name_or_path", str(DEMO_MODEL), "--mcp_manager_url", self.mcp_url,
             "--max_tokens", "900", "--tool_timeout", "5", "--startup_timeout", "20", *self.flags]
        )  # fmt: skip

    @asynccontextmanager
    async def sampler(self, agent: str, **task: Any) -> AsyncIterator[AsyncSampler]:
        """A sampler of an attempt at a task, with everything open that it needs."""
        kind, records = find_agent(agent), RecordLedger(self.database, 60.0)
        async with (
            ServicePool(patience_s=5) as pool,
            kind.open_resources(self.config, pool, records) as resources,
        ):
            pool.update([self.service.url])
            claim = self._claim(task)
            record = new_record(claim, "test", agent)
            await records.start([record], time.monotonic())
            yield kind(claim, record, resources)

    async def attempt(self, agent: str, **task: Any) -> Record:
        """Run an attempt to its end, and score it."""
        async with self.sampler(agent, **task) as sampler:
            return await sampler.score(await sampler.sample())

    async def turns(self, record: Record) -> list[DispatchedSamplingTask]:
        cursor = self.database.turns.find({"record_id": record.id}).sort("turn", 1)
        return [DispatchedSamplingTask.from_mongo(document) async for document in cursor]

    def _claim(self, values: dict[str, Any]) -> Claim:
        task = Task(
            id=f"train-0-line-{self._n_attempts}", task_id="line-1", split=Split.TRAIN, epoch=0,
            seq=0, group_order=0, pending=0, slots=[Slot(rollout=0)],
            **{"query": "How many?", "answer": "42", "scorer": "exact_match",
               "answer_schema": "answer", **values},
        )  # fmt: skip
        self._n_attempts += 1
        return Claim(task, 0, attempt=0, failures=0)


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
