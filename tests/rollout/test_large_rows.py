"""Conversations whose turns share no token: rows larger than a document of MongoDB."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from answering_service import VERSION, AnsweringService
from scripted_run import all_tasks, begin_run, completed, until

from agentrl.configs import Config, parse_config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import RecordStatus, RowStatus, Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.policies import Lineage
from agentrl.databases.records import RecordLedger
from agentrl.databases.row_ledger import RowLedger, fetch_rows
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents import find_agent
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.process import Agents
from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.scheduling.scheduler import SamplingScheduler

END = "<|im_end|>"
TURNS = 40
PROMPT = 50_000  # tokens of each turn's prompt, about


@pytest.fixture
def counting_model(tmp_path: Path, demo_model: Path) -> Path:
    """A model whose chat template begins each prompt with the number of its messages."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model, folder)
    template = folder / "chat_template.jinja"
    template.write_text("{{- messages|length ~ '. ' }}" + template.read_text())
    return folder


async def sample(database: RunDatabase, config: Config, service: str) -> None:
    """A sampler process at work on one task with two rollouts, until it is finalised."""
    ledger = TaskLedger(database, "feeder", lease_seconds=9, max_failures=1)
    line = TaskLine(id="long", query="a " * (PROMPT // 2), answer="42", scorer="exact_match")
    await ledger.add(make_tasks([line], Split.TRAIN, 0, 2, range(1)))
    await begin_run(database, service=service)
    records = RecordLedger(database, 60.0)
    async with (
        ServicePool() as pool,
        AsyncSampler.open_resources(config, pool, records) as shared,
        Agents(shared, find_agent("mcp")) as agents,
    ):
        scheduler = SamplingScheduler(database, config, agents, "sampler")
        running = asyncio.create_task(scheduler.run())
        try:
            await until(completed(database, 1), 300)
        finally:
            scheduler.stop()
            scheduler.stop()
            await running


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_template_that_rewrites_the_head_of_each_prompt_makes_rows_that_are_trained(
    database: RunDatabase, demo_renderer: ChatRenderer, hostile_server: Any, counting_model: Path
) -> None:
    async def answer(prompt: str) -> str:
        turn = prompt.count("<tool_response>")
        if turn + 1 == TURNS:
            return f"<answer>42</answer>{END}"
        call = json.dumps({"name": "echo", "arguments": {"text": str(turn)}})
        return f"<tool_call>\n{call}\n</tool_call>{END}"

    config = parse_config(
        ["--model_name_or_path", str(counting_model), "--mcp_manager_url", hostile_server.url,
         "--num_generations", "2", "--drop_zero_advantage", "false", "--tool_timeout", "5",
         "--startup_timeout", "20", "--max_tokens", str(2 * TURNS * PROMPT)]
    )  # fmt: skip
    async with AnsweringService(demo_renderer, answer).running() as service:
        await sample(database, config, service.url)
        asked = {
            (tuple(prompt), tuple(output))
            for prompt, output in zip(service.prompts, service.outputs, strict=True)
        }
    (task,) = await all_tasks(database)
    assert task.outcome is not None and task.outcome.rows == 2
    statuses = [record["status"] async for record in database.records.find()]
    assert statuses == [RecordStatus.READY] * 2

    ledger, lineage = RowLedger(database, "trainer", fence=2), Lineage({VERSION: 0})
    headers = await ledger.lease(1, 2, lineage, 9)
    fetched = await fetch_rows(database, [header.id for header in headers])
    assert not fetched.faults
    trained = set()
    for row in fetched.rows:
        assert row.n_tokens > TURNS * PROMPT and len(row.tree.paths()) == TURNS
        for path in row.tree.paths():
            line = row.tree.take(row.tree.places(path))
            sampled = int(line["mask"].argmax())
            assert line["mask"][sampled:].all()
            ids = line["ids"].tolist()
            trained.add((tuple(ids[:sampled]), tuple(ids[sampled:])))
            assert line["logprobs"][sampled:].tolist() == pytest.approx(
                [-token / 1000 for token in ids[sampled:]]
            )
    assert trained == asked
    assert await ledger.commit(1, [row.id for row in fetched.rows]) == 2
    async for document in database.rows.find():
        assert document["status"] == RowStatus.TRAINED
