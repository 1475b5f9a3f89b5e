"""A model that speaks lines of a script over real HTTP, and samplers that talk with it."""

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from agentrl.configs import Config, parse_config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DispatchedSamplingTask, Record, Slot, Split, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.tasks import Claim
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents.base import SamplerResources
from agentrl.rollout.agents.mcp import MCPSampler
from agentrl.rollout.agents.tool_sampler import MCPResources
from agentrl.rollout.chat import ChatRenderer

Service = TypeVar("Service", bound="ScriptedService")

DEMO = Path(__file__).parents[2] / "assets" / "demo"
END = "<|im_end|>"


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass
class ScriptedService:
    """Answers `/generate` with the next line of its script, cut at `max_new_tokens`."""

    renderer: ChatRenderer
    script: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def next_line(self, request_id: str) -> str:
        """What the model says to a request: the Record's id and a number are its id."""
        return self.script.pop(0)

    def logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Those that it says it sampled with: each tells which token it is of."""
        return [-token / 1000 for token in ids]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        ids = self.renderer.encode(self.next_line(body["rid"]))
        limit = body["sampling_params"]["max_new_tokens"]
        if len(ids) > limit:
            ids, reason = ids[:limit], {"type": "length", "length": limit}
        else:
            reason = {"type": "stop", "matched": ids[-1]}
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "2",
            "weight_versions": [{"version": "2", "start": 0, "end": len(ids)}],
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(self.logprobs(body["input_ids"], ids), ids, strict=True)
            ],
            "input_token_logprobs": [],
            "e2e_latency": 0.0,
        }
        chunk = json.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n")


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[Service]:
    """The service, answering at its `url`."""
    app = web.Application()
    app.router.add_post("/generate", service.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield service
    await runner.cleanup()


def make_config(mcp_url: str, *flags: str) -> Config:
    return parse_config(
        ["--model_name_or_path", str(DEMO / "model"), "--mcp_manager_url", mcp_url,
         "--max_tokens", "900", "--tool_timeout", "1", "--startup_timeout", "20", *flags]
    )  # fmt: skip


@asynccontextmanager
async def resources_for(
    config: Config, service_url: str, database: RunDatabase
) -> AsyncIterator[MCPResources]:
    async with (
        ServicePool(patience_s=5) as pool,
        MCPSampler.open_resources(config, pool, RecordLedger(database, 60.0)) as resources,
    ):
        pool.update([service_url])
        yield resources


def claim_and_record(
    resources: SamplerResources, number: int = 0, **task: Any
) -> tuple[Claim, Record]:
    """A slot of ours, and its Record."""
    values: dict[str, Any] = {
        "task_id": "line-1", "query": "How many?", "answer": "42", "scorer": "exact_match",
        "answer_schema": "answer", **task,
    }  # fmt: skip
    made = Task(
        _id=f"train-0-{values['task_id']}", split=Split.TRAIN, epoch=0, seq=0, group_order=0,
        pending=0, slots=[Slot(rollout=number)], **values,
    )  # fmt: skip
    claim = Claim(made, number, attempt=0, failures=0)
    record = Record(
        _id=claim.record_id, task=made.id, task_id=made.task_id, rollout=number, attempt=0,
        split=Split.TRAIN, epoch=0, owner="test", query=made.query,
    )  # fmt: skip
    resources.records.leases.begin([record.id], time.monotonic())
    return claim, record


def make_sampler(resources: MCPResources, number: int = 0, **task: Any) -> MCPSampler:
    return MCPSampler(*claim_and_record(resources, number, **task), resources)


async def stored_turns(database: RunDatabase, record: Record) -> list[DispatchedSamplingTask]:
    cursor = database.turns.find({"record_id": record.id}).sort("turn", 1)
    return [DispatchedSamplingTask.from_mongo(document) async for document in cursor]


Talk = Callable[..., AbstractAsyncContextManager[tuple[MCPSampler, MCPResources]]]
"""`talk(*script, flags=..., **fields_of_the_task)`: a sampler whose model speaks the script."""


def talk_with(service: ScriptedService, tools_url: str, database: RunDatabase) -> Talk:
    @asynccontextmanager
    async def begin(
        *script: str, flags: Sequence[str] = (), **task: Any
    ) -> AsyncIterator[tuple[MCPSampler, MCPResources]]:
        service.script = list(script)
        config = make_config(tools_url, *flags)
        async with resources_for(config, service.url, database) as resources:
            yield make_sampler(resources, **task), resources

    return begin
