"""A run whose conversations branch, from its tasks to an optimizer step.

The real scheduler, MCP agent, MCP server and mongod; the model says lines of a script, with the
logprobs that the real model gives them after the prompt that it was asked with. The trainer, which
reads nothing but the database, must find exactly these again: with another token before a trained
one, or another place of it, the model's logprob would be another.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import scripted_run
import torch
import torch.distributed as dist
from accelerate import Accelerator
from scripted_service import DEMO, END, ScriptedService, serving, stored_turns, tool_call
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from agentrl.configs import (
    ComputeConfig,
    LearnerConfig,
    LossConfig,
    OptimizerConfig,
    parse_config,
)
from agentrl.databases import runs, services
from agentrl.databases.arrays import unpack_ints
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, Record, Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.policies import Lineage
from agentrl.databases.runs import RunLease
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.rollout.agents.context_strategies import SUMMARY_REQUEST
from agentrl.rollout.agents.mcp import MCPSampler
from agentrl.rollout.chat import ChatRenderer
from agentrl.training.data.sequences import row_sequences
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import make_mesh
from agentrl.training.step.objective import Objective
from agentrl.training.step.optimizer import make_optimizer, make_scheduler
from agentrl.training.step.statistics import StepStatistics
from agentrl.training.step.train_step import train_step

ROOM = ("--max_tokens", "6000", "--max_prompt_tokens")
VERSION = 2  # of the policy that the service has


def demo_model() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        DEMO / "model", dtype=torch.float32
    )
    return model.eval()


@dataclass
class HonestService(ScriptedService):
    """Gives every line the logprobs that the model has for it. `scripts`: by attempt."""

    scripts: dict[str, list[str]] = field(default_factory=dict)
    model: PreTrainedModel = field(default_factory=demo_model)

    def next_line(self, request_id: str) -> str:
        attempt = next(attempt for attempt in self.scripts if attempt in request_id)
        return self.scripts[attempt].pop(0)

    def logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([[*prompt_ids, *ids]])).logits[0]
        places = torch.arange(len(prompt_ids), len(prompt_ids) + len(ids))
        chosen = torch.log_softmax(logits, -1)[places - 1, torch.tensor(ids)]
        return [float(logprob) for logprob in chosen]


@dataclass
class LongService(HonestService):
    """Asks for a long text in every turn until `answer_at`, sums up when it is asked to, and
    computes the logprobs of a prompt that goes on from the last one only for what is new."""

    answer_at: int = 0
    summaries: int = 0
    _n_said: int = 0
    _held: list[int] = field(default_factory=list)
    _cache: DynamicCache = field(default_factory=DynamicCache)

    def next_line(self, request_id: str) -> str:
        if "-t1-" in request_id:
            return WRONG
        self._n_said += 1
        if SUMMARY_REQUEST[:80] in self.renderer.codec.decode(
            self.requests[-1]["input_ids"][-600:]
        ):
            self.summaries += 1
            return f"Many x, {self.summaries} times.{END}"
        return RIGHT if self._n_said == self.answer_at else big(600 + self._n_said)

    def logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        tokens = [*prompt_ids, *ids]
        if tokens[: len(self._held)] != self._held:
            self._held, self._cache = [], DynamicCache()
        new = torch.tensor([tokens[len(self._held) :]])
        with torch.no_grad():
            logits = self.model(input_ids=new, past_key_values=self._cache).logits[0]
        self._held = tokens
        chosen = torch.log_softmax(logits[-len(ids) - 1 : -1], -1)
        return chosen[torch.arange(len(ids)), torch.tensor(ids)].tolist()


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


async def sample_group(
    database: RunDatabase, service: HonestService, tools_url: str, *flags: str, within_s: float = 60
) -> list[DBRecordData]:
    """Sample one task's two attempts; returns the rows that its finalisation wrote."""
    config = parse_config(
        ["--model_name_or_path", str(DEMO / "model"), "--mcp_manager_url", tools_url,
         "--num_generations", "2", "--max_failures", "1", *flags]
    )  # fmt: skip
    lease = RunLease(database, "trainer", "here", lease_seconds=60)
    await lease.acquire(rows_per_step=2)
    await lease.progress(step=0, max_steps=9, version=VERSION, status=runs.TRAINING)
    await services.register_urls(database, [service.url])
    await services.acknowledge(database, service.url, VERSION)
    line = TaskLine(
        id="line", query="How many?", answer="42", scorer="exact_match", answer_schema="answer"
    )
    ledger = TaskLedger(database, "feeder", lease_seconds=9, max_failures=1)
    await ledger.add(make_tasks([line], Split.TRAIN, 0, 2, [0]))
    async with scripted_run.scheduler(database, MCPSampler, config) as scheduler:
        sampling = asyncio.create_task(scheduler.run())
        await scripted_run.until(scripted_run.completed(database, 1), within_s)
        scheduler.stop()
        await sampling
    return [DBRecordData.from_mongo(row) async for row in database.rows.find().sort("_id", 1)]


def ask(name: str, arguments: str) -> str:
    return tool_call(name, arguments) + END


def big(n: int) -> str:
    return ask("big", f'{{"n": {n}}}')


SAME = ask("echo", '{"text": "a"}')
RIGHT, WRONG = f"<answer>42</answer>{END}", f"<answer>41</answer>{END}"


@pytest.mark.parametrize(
    ("flags", "scripts", "rewritings"),
    [
        pytest.param(
            [*ROOM, "1500", "--new_context", "discard_all"],
            {
                "-t0-": [big(300), big(400), big(450), f"Many x.{END}", SAME, SAME, RIGHT],
                "-t1-": [big(700), big(500), f"Some x.{END}", big(600), f"More x.{END}", WRONG],
            },
            {
                "-t0-": ["summary", "discard_all", "repetition"],
                "-t1-": ["summary", "discard_all", "summary", "discard_all"],
            },
            id="discard_all",
        ),
        pytest.param(
            [*ROOM, "1300", "--new_context", "discard_all_tools"],
            {
                "-t0-": [big(200), SAME, SAME, big(400), big(401), big(402), RIGHT],
                "-t1-": [big(600), big(500), big(400), big(501), WRONG],
            },
            {
                "-t0-": ["repetition", "discard_all_tools", "discard_all_tools"],
                "-t1-": ["discard_all_tools", "discard_all_tools"],
            },
            id="discard_all_tools",
        ),
    ],
)
async def test_branches_are_trained_as_they_were_sampled(
    database: RunDatabase, demo_renderer: ChatRenderer, hostile_server: Any,
    flags: list[str], scripts: dict[str, list[str]], rewritings: dict[str, list[str]],
) -> None:  # fmt: skip
    said = {attempt: list(lines) for attempt, lines in scripts.items()}
    compress = ["--remove_repeated_turns", "true"]
    async with serving(HonestService(demo_renderer, scripts=scripts)) as service:
        rows = await sample_group(database, service, hostile_server.url, *flags, *compress)
    assert len(rows) == 2

    # The documents give back what was asked and what was said.
    async for document in database.records.find():
        record = Record.from_mongo(document)
        [attempt] = [attempt for attempt in said if attempt in record.id]
        turns = await stored_turns(database, record)
        assert [str(turn.rewrite) for turn in turns if turn.rewrite] == rewritings[attempt]
        outputs = [unpack_ints(turn.output_ids).tolist() for turn in turns]
        assert outputs == [demo_renderer.encode(line) for line in said[attempt]]

    # The rows are trees, in which nothing that was shared is computed or trained twice.
    asked = [request["input_ids"] for request in service.requests]
    for row in rows:
        assert len(row.tree.nodes) > 3
        assert row.n_tokens < sum(map(len, asked)) / 2

    statistics = train(rows, micro_batch_tokens=4000)
    assert statistics.n_train_tokens == sum(
        len(demo_renderer.encode(line)) for lines in said.values() for line in lines
    )


def train(rows: list[DBRecordData], micro_batch_tokens: int) -> StepStatistics:
    """One step. The trainer's model, which is the one that sampled, must find the sampler's
    logprobs again."""
    model = demo_model()
    mesh = make_mesh(Accelerator(cpu=True))
    prepare_model(model, mesh, ComputeConfig())
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-4))
    statistics = train_step(
        model,
        optimizer,
        make_scheduler(optimizer, OptimizerConfig(), 10),
        [row_sequences(row, Lineage({VERSION: 0}), 0) for row in rows],
        Objective(LossConfig()),
        LearnerConfig(ComputeConfig(micro_batch_tokens=micro_batch_tokens)),
        mesh,
    )
    assert statistics.ratio_min == pytest.approx(1.0, abs=2e-3)
    assert statistics.ratio_max == pytest.approx(1.0, abs=2e-3)
    assert np.isfinite(statistics.loss) and statistics.grad_norm > 0
    return statistics


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_record_of_200_turns_goes_through_many_contexts_and_is_trained(
    database: RunDatabase, demo_renderer: ChatRenderer, hostile_server: Any
) -> None:
    context, prompt = 16_384, 15_872
    flags = [
        "--max_tokens", str(context), "--max_prompt_tokens", str(prompt), "--max_new_tokens", "256",
        "--max_turns", "200", "--new_context", "discard_all",
    ]  # fmt: skip
    async with serving(LongService(demo_renderer, answer_at=200)) as service:
        rows = await sample_group(database, service, hostile_server.url, *flags, within_s=600)
    found = await database.records.find_one({"rollout": 0})
    assert found is not None
    record = Record.from_mongo(found)
    assert (record.n_turns, record.stop_reason, record.score) == (200, "answered", 1.0)
    assert service.summaries > 5 and record.n_drifts == 0
    longest = max(len(request["input_ids"]) for request in service.requests)
    assert prompt - 1500 < longest <= prompt
    row = next(row for row in rows if row.id == record.id)
    assert row.n_tokens > 100_000  # of the record, which no limit bounds
    paths = [sum(row.tree.lengths[node] for node in path) for path in row.tree.paths()]
    assert len(paths) > service.summaries and max(paths) <= context
    statistics = train(rows, micro_batch_tokens=context)
    turns = [
        turn for each in await _records(database) for turn in await stored_turns(database, each)
    ]
    assert statistics.n_train_tokens == sum(len(unpack_ints(turn.output_ids)) for turn in turns)


async def _records(database: RunDatabase) -> list[Record]:
    return [Record.from_mongo(document) async for document in database.records.find()]
