"""A scripted inference service, an MCP server whose tool takes as long as told, tasks for both.

What `sampler.py` and `async_overlap.py` have samplers talk to, each as a process of its own. Every
record has `turns` turns: calls of the tool `work(seconds)`, then an answer that is right in every
other trajectory of a group. The service takes `latency_s` for each turn, whatever it is asked, and
knows the record and the turn by the request's `rid`; how long each call takes is drawn from a
log-normal distribution with that median, by record and turn, so that all runs get the same ones.

    python benchmarks/scripted_services.py model '{"latency_s": 0.1, ...}'
    python benchmarks/scripted_services.py tools
    python benchmarks/scripted_services.py traces      # takes all OTLP traces, and forgets them
"""

import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path

import orjson
import uvloop
from aiohttp import web

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.held_port import HeldPort

DEMO_MODEL = Path(__file__).parents[1] / "assets" / "demo" / "model"
ANSWER = "1"
_WORDS = (
    "the", "bin", "holds", "a", "bolt", "nut", "screw", "washer", "crate", "of", "and", "in",
    "aisle", "12", "7", "40",
)  # fmt: skip
_RID = re.compile(r"(?P<record>.+-t(?P<rollout>\d+)-a\d+)-(?P<turn>\d+)(\.\d+)?")


@dataclass(frozen=True)
class Script:
    """What the service does. `tool_sigma`: of the logarithm of a call's seconds; 0: all alike.

    `thought_words`, `call_words`, `result_words`: of each turn that makes a call, beside what it
    needs.
    """

    latency_s: float
    turns: int
    tool_median_s: float
    tool_sigma: float = 0.0
    thought_words: int = 0
    call_words: int = 0
    result_words: int = 0

    def tool_seconds(self, record: str, turn: int) -> float:
        """Seconds that the call of this turn takes."""
        draw = random.Random(f"{record}/{turn}")
        return round(draw.lognormvariate(log(self.tool_median_s), self.tool_sigma), 3)

    @property
    def critical_path_s(self) -> float:
        """A record's seconds at the services, if all its calls take the median."""
        return self.turns * self.latency_s + (self.turns - 1) * self.tool_median_s

    def text(self, record: str, rollout: int, turn: int) -> str:
        """What the model says."""
        if turn == self.turns - 1:
            return f"<answer>{ANSWER if rollout % 2 else 0}</answer>"
        arguments: dict[str, object] = {"seconds": self.tool_seconds(record, turn)}
        if self.result_words:
            arguments["words"] = self.result_words
        if self.call_words:
            arguments["note"] = " ".join(random_words(self.call_words, f"{record}/{turn}/call"))
        thought = " ".join(random_words(self.thought_words, f"{record}/{turn}/thought"))
        call = json.dumps({"name": "work", "arguments": arguments})
        lead = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        return f"{lead}<tool_call>\n{call}\n</tool_call>"


def random_words(count: int, seed: str) -> list[str]:
    """Words that differ from seed to seed."""
    return random.Random(seed).choices(_WORDS, k=count)


@contextmanager
def model_service(script: Script) -> Iterator[str]:
    """The inference service; yields its URL."""
    with _started("model", json.dumps(asdict(script))) as url:
        yield url


@contextmanager
def tool_server() -> Iterator[str]:
    """The MCP server; yields its URL."""
    with _started("tools") as url:
        yield url


@contextmanager
def trace_receiver() -> Iterator[str]:
    """The receiver of traces; yields its URL."""
    with _started("traces") as url:
        yield url


@contextmanager
def _started(*arguments: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit(f"the {arguments[0]} server ended with {process.wait()}")
        yield url
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


async def add_groups(database: RunDatabase, groups: int, rollouts: int) -> None:
    """Add tasks, with so many rollouts each, that the script answers."""
    lines = [
        TaskLine(
            id=f"line-{seq}",
            query="How many parts are in the bin that holds the bolts?",
            answer=ANSWER,
            answer_schema="answer",
            scorer="exact_match",
        )
        for seq in range(groups)
    ]
    tasks = make_tasks(lines, Split.TRAIN, epoch=0, rollouts=rollouts, order=range(groups))
    await TaskLedger(database, "feeder", lease_seconds=60, max_failures=1).add(tasks)


async def _serve_model(script: Script) -> None:
    from agentrl.rollout.chat import ChatRenderer

    renderer = ChatRenderer.load(DEMO_MODEL)
    version = "0"

    async def generate(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        asked = _RID.fullmatch(body["rid"])
        assert asked is not None, body["rid"]
        text = script.text(asked["record"], int(asked["rollout"]), int(asked["turn"]))
        ids = [*renderer.encode(text), renderer.turn_end_id]
        made_by = version
        await asyncio.sleep(script.latency_s)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": made_by,
            "weight_versions": [{"version": made_by, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.1, token, None] for token in ids],
            "e2e_latency": script.latency_s,
        }
        answer = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        return web.Response(
            body=b"data: " + answer + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream"
        )

    async def update(request: web.Request) -> web.Response:
        nonlocal version
        version = orjson.loads(await request.read())["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def accept(_: web.Request) -> web.Response:
        return web.json_response({"success": True})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", generate)
    app.router.add_post("/update_weights_from_disk", update)
    app.router.add_get("/ready", accept)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


async def _serve_traces() -> None:
    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def _serve_tools() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("tools", log_level="WARNING")

    @server.tool(structured_output=False)
    async def work(seconds: float, words: int = 0, note: str = "") -> str:
        """Work for so many seconds, and answer with so many words."""
        await asyncio.sleep(seconds)
        return " ".join(random_words(words, note)) or "done"

    with HeldPort() as port:
        print(f"http://127.0.0.1:{port.number}/mcp", flush=True)
        server.run(
            "streamable-http", host="127.0.0.1", port=port.number, stateless_http=True,
            json_response=True,
        )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "model":
        uvloop.run(_serve_model(Script(**json.loads(sys.argv[2]))))
    elif sys.argv[1] == "traces":
        uvloop.run(_serve_traces())
    else:
        _serve_tools()
