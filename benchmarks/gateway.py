"""What a gateway adds to a call of the model, and what it stores, beside LiteLLM's proxy.

A scripted service answers after a fixed time. Sessions of several turns, each with its whole
history, ask it through the gateway, through LiteLLM's proxy, through a bare proxy, and directly,
round by round:

    latency   sessions that pause between calls: seconds of a call beyond the service's own
    rate      sessions that do not, over a service that takes no time: calls for each CPU second of
              the gateway or the proxy

The gateway stores each turn in a database before it answers, durably; LiteLLM stores nothing. The
bare proxy forwards each call as it is and stores a document of a turn's size: less than that no
gateway with a ledger can do in Python here.

    bash benchmarks/gateway.sh [--quick] [--save]      sets up LiteLLM's environment, once
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop
from aiohttp import web
from pymongo import AsyncMongoClient, WriteConcern
from report import finish, parse_flags

from agentrl.databases import runs, services
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.runs import RunLease
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.held_port import HeldPort

DEMO_MODEL = Path(__file__).parents[1] / "assets" / "demo" / "model"
RUN = "gateway"
TURNS = 8  # of a session
SAID = "The bolts are in bin B7, and the nuts are in the bin beside it."
ASKED = "And how many of them are there in all the bins of this aisle, as far as you know?"
LATENCY_S = 0.5  # of the service, where latency is measured
PAUSE_S = 2.0  # between two calls of a session there, on average
CLOSED = 16  # sessions that do not pause
TURN_BYTES = 1400  # of a stored turn (`bytes_by_turn`)


@dataclass(frozen=True)
class Way:
    """A way to the model. `url`, `key`: of the chat completions, unless sessions are claimed."""

    name: str
    server: psutil.Process | None
    url: str
    key: str
    claims: bool = False


@dataclass
class Round:
    """What the calls of one round took. `added`: seconds of each beyond the service's own."""

    added: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0


async def drive(way: Way, sessions: int, seconds: float, latency_s: float, pause_s: float) -> Round:
    """Let sessions ask for so many seconds."""
    made, draw = Round(), random.Random(0)
    connector = aiohttp.TCPConnector(limit=0)
    before = _cpu(way.server)
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=connector) as http:
        workers = [
            _session(way, http, made, began + seconds, latency_s, pause_s, draw)
            for _ in range(sessions)
        ]
        await asyncio.gather(*workers)
    made.seconds = time.monotonic() - began
    made.cpu_s = _cpu(way.server) - before
    return made


async def _session(
    way: Way, http: aiohttp.ClientSession, made: Round, until: float, latency_s: float,
    pause_s: float, draw: random.Random,
) -> None:  # fmt: skip
    await asyncio.sleep(draw.uniform(0, pause_s))
    while time.monotonic() < until:
        url, key = way.url, way.key
        if way.claims:
            claimed = await _post(http, f"{way.url}/tasks/claim", {"timeout": 60}, "")
            url, key = f"{way.url}{claimed['path']}/v1", claimed["key"]
        messages = [{"role": "user", "content": "Where are the bolts?"}]
        for _ in range(TURNS):
            began = time.perf_counter()
            body = {"model": "m", "messages": messages}
            answer = await _post(http, f"{url}/chat/completions", body, key)
            made.added.append(time.perf_counter() - began - latency_s)
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": ASKED}]
            if time.monotonic() > until:
                break
            await asyncio.sleep(draw.uniform(0.5, 1.5) * pause_s)
        if way.claims:
            await _post(http, f"{way.url}{claimed['path']}/reward", {"reward": 1.0}, key)
            await _post(http, f"{way.url}{claimed['path']}/finish", {}, key)


async def _post(http: aiohttp.ClientSession, url: str, body: Any, key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with http.post(url, data=orjson.dumps(body), headers=headers) as response:
        said = await response.read()
        assert response.status == 200, (url, response.status, said[:500])
        return orjson.loads(said)


def _cpu(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


@asynccontextmanager
async def ways(
    folder: Path, sessions: int, latency_s: float
) -> AsyncIterator[tuple[list[Way], RunDatabase]]:
    """All ways to a service of this latency, and the gateway's database."""
    mongod = EmbeddedMongod(folder / f"data-{latency_s}", folder / "mongod.log")
    mongod.start()
    database = await connect(mongod.url, RUN)
    started: list[subprocess.Popen[bytes]] = []
    held = [HeldPort() for _ in range(4)]
    service, gateway, proxy, bare = (f"http://127.0.0.1:{port.number}" for port in held)
    try:
        started.append(
            _start([sys.executable, __file__, "--serve", held[0].number, latency_s], folder)
        )
        lease = RunLease(database, "trainer", "here", lease_seconds=600)
        await lease.acquire(rows_per_step=10**6)
        await lease.progress(step=0, max_steps=9, version=0, status=runs.TRAINING)
        await services.register_urls(database, [service])
        await services.acknowledge(database, service, 0)
        lines = [TaskLine(id=f"{n}", query="q", scorer="exact_match") for n in range(4000)]
        ledger = TaskLedger(database, "feeder", lease_seconds=60, max_failures=1)
        await ledger.add(make_tasks(lines, Split.TRAIN, 0, 2, range(len(lines))))
        started.append(_start([
            sys.executable, "-m", "agentrl.cli", "gateway", "--run_name", RUN, "--agent_name",
            "outside", "--model_name_or_path", DEMO_MODEL, "--num_generations", 2,
            "--gateway_port", held[1].number, "--db_connection_string", mongod.url,
            "--max_concurrent_samples_per_process", 2 * sessions, "--max_turns", 10_000,
            "--drop_zero_advantage", "false", "--max_failures_without_success", 0,
        ], folder))  # fmt: skip
        barest = [sys.executable, __file__, "--bare", held[3].number, service, mongod.url]
        started.append(_start(barest, folder))
        found = [
            Way("direct", None, f"{service}/v1", "x"),
            Way("gateway", psutil.Process(started[1].pid), gateway, "", claims=True),
            Way("bare", psutil.Process(started[2].pid), f"{bare}/v1", "x"),
        ]
        waited_for = [f"{service}/ready", f"{gateway}/v1/models", f"{bare}/ready"]
        if (litellm := os.environ.get("LITELLM_PYTHON")) is not None:
            config = folder / "litellm.yaml"
            params = {"model": "openai/m", "api_base": f"{service}/v1", "api_key": "x"}
            model = {"model_name": "m", "litellm_params": params}
            key = f"sk-{secrets.token_hex(32)}"  # the proxy does not start without one
            settings = {"general_settings": {"master_key": key}}
            config.write_text(json.dumps({"model_list": [model], **settings}))
            command = [
                Path(litellm).with_name("litellm"),
                "--config",
                config,
                "--port",
                held[2].number,
            ]
            started.append(_start([*command, "--host", "127.0.0.1", "--num_workers", 1], folder))
            found.append(Way("litellm", psutil.Process(started[3].pid), f"{proxy}/v1", key))
            waited_for.append(f"{proxy}/health/liveliness")
        await _until_they_answer(waited_for, started, folder)
        yield found, database
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()
        for port in held:
            port.release()
        await database.close()
        mongod.kill()


def _start(command: Sequence[object], folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LITELLM_LOG": "ERROR"}
    with (folder / "servers.log").open("ab") as log:
        words = [str(word) for word in command]
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment)


async def _until_they_answer(
    urls: Sequence[str], processes: Sequence[subprocess.Popen[bytes]], folder: Path
) -> None:
    async with aiohttp.ClientSession() as http:
        for url in urls:
            deadline = time.monotonic() + 180
            while True:
                try:
                    async with http.get(url):
                        break
                except aiohttp.ClientConnectionError:
                    if any(p.poll() is not None for p in processes) or time.monotonic() > deadline:
                        raise SystemExit((folder / "servers.log").read_text()[-3000:]) from None
                    await asyncio.sleep(0.2)


async def serve(port: int, latency_s: float) -> None:
    """The service: SGLang's route for the gateway, OpenAI's for the others."""
    from agentrl.rollout.chat import ChatRenderer

    renderer = ChatRenderer.load(DEMO_MODEL)
    ids = [*renderer.encode(SAID), renderer.turn_end_id]
    spans = [{"version": "0", "start": 0, "end": len(ids)}]

    async def generate(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if latency_s:
            await asyncio.sleep(latency_s)
        meta = {
            "id": body["rid"], "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids),
            "cached_tokens": 0, "weight_version": "0", "weight_versions": spans,
            "output_token_logprobs": [[-0.1, token, None] for token in ids], "e2e_latency": 0.0,
        }  # fmt: skip
        chunk = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        return web.Response(
            body=b"data: " + chunk + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream"
        )

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        if latency_s:
            await asyncio.sleep(latency_s)
        message = {"role": "assistant", "content": SAID}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": len(ids), "total_tokens": 9 + len(ids)}
        answer = {
            "id": "x", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [choice], "usage": usage,
        }  # fmt: skip
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    await _serve(port, {"/generate": generate, "/v1/chat/completions": chat})


async def bare_proxy(port: int, service: str, mongodb: str) -> None:
    """Forward each call, and store a document before its answer ends."""
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongodb)
    turns = client["bare"].get_collection("turns", write_concern=WriteConcern(w="majority"))
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def chat(request: web.Request) -> web.Response:
        sent = orjson.dumps(orjson.loads(await request.read()))
        headers = {"Content-Type": "application/json"}
        url = f"{service}/v1/chat/completions"
        async with http.post(url, data=sent, headers=headers) as answer:
            said = await answer.read()
        await turns.insert_one({"_id": secrets.token_hex(8), "text": "x" * TURN_BYTES})
        return web.Response(body=said, content_type="application/json")

    await _serve(port, {"/v1/chat/completions": chat})


async def _serve(
    port: int, routes: Mapping[str, Callable[[web.Request], Awaitable[web.Response]]]
) -> None:
    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=2**26)
    for path, handler in routes.items():
        app.router.add_post(path, handler)
    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def bytes_by_turn(database: RunDatabase) -> dict[int, int]:
    """Median bytes of the stored turns, by their number in the session."""
    sizes: dict[int, list[int]] = {}
    cursor = await database.turns.aggregate(
        [{"$project": {"turn": 1, "size": {"$bsonSize": "$$ROOT"}}}]
    )
    async for document in cursor:
        sizes.setdefault(document["turn"], []).append(document["size"])
    return {turn: int(statistics.median(sizes[turn])) for turn in sorted(sizes)}


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(values)
    at = {"p50_ms": 0.5, "p99_ms": 0.99}
    return {n: round(1000 * ordered[int(q * (len(ordered) - 1))], 2) for n, q in at.items()}


async def main(flags: argparse.Namespace) -> None:
    rounds, seconds = (1, 8.0) if flags.quick else (3, 25.0)
    counts = (1, 64) if flags.quick else (1, 64, 512)
    latency: dict[str, dict[str, dict[str, float]]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-gateway-") as folder:
        async with ways(Path(folder), max(counts), LATENCY_S) as (all_ways, database):
            for sessions in counts:
                added: dict[str, list[float]] = {way.name: [] for way in all_ways}
                for _ in range(rounds):
                    for way in all_ways:
                        made = await drive(way, sessions, seconds, LATENCY_S, PAUSE_S)
                        added[way.name] += made.added
                latency[str(sessions)] = {name: milliseconds(v) for name, v in added.items()}
            stored = await bytes_by_turn(database)
        async with ways(Path(folder), CLOSED, 0.0) as (all_ways, _):
            for warm in (True, *(False for _ in range(rounds))):
                for way in all_ways:
                    made = await drive(way, CLOSED, 3.0 if warm else seconds, 0.0, 0.0)
                    if not warm and way.server is not None:
                        calls = len(made.added)
                        per = (calls / made.seconds, calls / max(made.cpu_s, 1e-9))
                        rates.setdefault(way.name, []).append(per)
    result: dict[str, Any] = {
        "turns_of_a_session": TURNS,
        "service_s": LATENCY_S,
        "added": latency,
        "calls_per_s": {n: round(statistics.median(r for r, _ in v), 1) for n, v in rates.items()},
        "calls_per_cpu_s": {
            n: round(statistics.median(c for _, c in v), 1) for n, v in rates.items()
        },
        "bytes_by_turn": stored,
        "rounds": rounds,
        "load_before": flags.load,
    }
    if "litellm" in rates:
        per = result["calls_per_cpu_s"]
        result["times_litellm"] = round(per["gateway"] / per["litellm"], 2)
    finish("gateway", result, ("aiohttp", "pymongo"), save=flags.save)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        uvloop.run(serve(int(sys.argv[2]), float(sys.argv[3])))
    elif sys.argv[1:2] == ["--bare"]:
        uvloop.run(bare_proxy(int(sys.argv[2]), sys.argv[3], sys.argv[4]))
    else:
        given = parse_flags(__doc__ or "")
        given.load = round(os.getloadavg()[0], 2)
        uvloop.run(main(given))
