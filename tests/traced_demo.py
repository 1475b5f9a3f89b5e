"""The demo with traces to a server that others wrote, in an environment of its own."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo_launch import launch_demo

from agentrl.databases.connection import connect
from agentrl.databases.documents import DispatchedSamplingTask, Record, ToolCall
from agentrl.databases.mongod import EmbeddedMongod


@contextmanager
def serving(
    command: Sequence[str], url: str, health: str, folder: Path, variables: Mapping[str, str]
) -> Iterator[None]:
    """Run a server in `folder` during the block, from when `url` + `health` answers."""
    told = (folder / "server.log").open("w")
    process = subprocess.Popen(
        command, cwd=folder, stdout=told, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, **variables},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 180
        while not _is_healthy(url + health):
            assert process.poll() is None and time.monotonic() < deadline, told.name
            time.sleep(0.3)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        process.wait(30)
        told.close()


def _is_healthy(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


def answer_of(command: Sequence[str]) -> Any:
    """What a server's client prints in its last line, as JSON."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class Traced:
    """A finished demo: its ended Records, and their turns in order."""

    def __init__(self, records: list[Record], turns: list[DispatchedSamplingTask]) -> None:
        self.records = {record.id: record for record in records}
        self._turns = sorted(turns, key=lambda turn: turn.turn)

    def turns(self, record: Record) -> list[DispatchedSamplingTask]:
        """Its turns that it had when it ended. One that was being stored when the sampler was
        stopped is in the database too."""
        own = set(record.turns)
        turns = [turn for turn in self._turns if turn.id in own]
        assert len(turns) == record.n_turns or record.sampled_at is None
        return turns

    def n_generated(self, record: Record) -> int:
        """Tokens of these turns."""
        return sum(len(turn.output_ids) // 4 for turn in self.turns(record))

    def calls(self, record: Record) -> list[ToolCall]:
        """Its tool calls that were made."""
        calls = [call for turn in self.turns(record) for call in turn.tool_calls]
        return [call for call in calls if call.started_at is not None]


async def launch_traced(folder: Path, endpoint: str) -> Traced:
    """Two steps of the demo, a twentieth of whose trajectories are traced."""
    flags = ("--max_steps", "2", "--otlp_endpoint", endpoint, "--trace_rate", "0.05")
    launched = launch_demo(folder, *flags)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    run = folder / "output" / "demo"
    with EmbeddedMongod(run / "mongo", run / "mongod-again.log") as mongod:
        database = await connect(mongod.url, "demo")
        ended = database.records.find({"finished_at": {"$ne": None}})
        records = [Record.from_mongo(document) async for document in ended]
        turns = [DispatchedSamplingTask.from_mongo(x) async for x in database.turns.find()]
        await database.close()
    return Traced(records, turns)
