"""Long records of a sampler: what a chat template costs that rewrites each turn, and what holds up
the event loop. The part of `sampler.py` behind `--turns` and `--tokens`.

Every record has so many turns, which end in a prompt of about so many tokens: a fifth of a turn's
tokens are a thought, a tenth are the call, the rest is what the tool answers. Two templates: the
demo's, which appends, and one that drops the thoughts of earlier turns, so that every turn begins a
new segment. Each pair of a template and a number of records at once runs in a process of its own,
as `agentrl sample` does it, beside a scripted service, an MCP server and a mongod:

    cpu_s_per_record      CPU seconds of the sampler
    mb_per_record         most memory that it took, less what it had before, for each record at once
    stored_mb_per_record  documents of turns, records and rows
    loop_block_ms_p99     how late a timer of 10 ms is, 99th percentile; `_max`: the most
    longest_task_ms       longest step of any task of the event loop; `_cpu`: in CPU time of its
                          thread, which other processes of the machine do not lengthen

`rewriting_over_appending` is the largest of the ratios of the first three.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from scripted_services import DEMO_MODEL, Script, model_service, random_words, tool_server

from agentrl.databases.mongod import EmbeddedMongod

AT_ONCE = (64, 256)
TEMPLATES = ("appending", "rewriting")
_THOUGHT, _RESULT = 0.2, 0.7  # shares of what a turn adds
_FORGETFUL = ("message.content or ''", "(message.content or '').split('</think>')[-1]")
_TICK_S = 0.01
_MEMORY_S = 0.05


@dataclass
class LoopWatch:
    """Measures the delays of an event loop."""

    lateness_s: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    longest_cpu_s: float = 0.0
    longest_in: str = ""

    def summary(self) -> dict[str, float | str]:
        """The reported figures."""
        late = np.array(self.lateness_s)
        return {
            "loop_block_ms_p99": round(1000 * float(np.percentile(late, 99)), 1),
            "loop_block_ms_max": round(1000 * float(late.max()), 1),
            "longest_task_ms": round(1000 * self.longest_s, 1),
            "longest_task_ms_cpu": round(1000 * self.longest_cpu_s, 1),
            "longest_task_in": self.longest_in,
        }

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch the tasks that are made from now on, and a timer."""
        loop = asyncio.get_running_loop()

        def timed_task(
            loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **rest: Any
        ) -> asyncio.Task[Any]:
            return asyncio.Task(_Timed(work, self), loop=loop, **rest)

        loop.set_task_factory(timed_task)
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            loop.set_task_factory(None)

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lateness_s.append(max(0.0, time.perf_counter() - due))


class _Timed(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are timed."""

    def __init__(self, work: Coroutine[Any, Any, Any], watch: LoopWatch) -> None:
        self._work = work
        self._watch = watch

    def send(self, value: Any) -> Any:
        with self._timed():
            return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        with self._timed():
            return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took, computed = time.perf_counter() - began, time.thread_time() - cpu
            self._watch.longest_s = max(self._watch.longest_s, took)
            if computed > self._watch.longest_cpu_s:
                self._watch.longest_cpu_s = computed
                self._watch.longest_in = self._work.__qualname__  # type: ignore[attr-defined]


@dataclass
class MemoryWatch:
    """The peak memory of this process in bytes."""

    before: int = 0
    most: int = 0

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Poll the memory until the block ends."""
        self.before = self.most = _resident()

        async def look() -> None:
            while True:
                self.most = max(self.most, _resident())
                await asyncio.sleep(_MEMORY_S)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def script_of(turns: int, tokens: int) -> Script:
    """A script for records of `turns` turns whose last prompt has about `tokens` tokens."""
    from agentrl.rollout.chat import ChatRenderer

    words = " ".join(random_words(2000, "rate"))
    rate = len(ChatRenderer.load(DEMO_MODEL).encode(words)) / 2000
    words_of_a_turn = tokens / turns / rate
    return Script(
        latency_s=0.5,
        turns=turns,
        tool_median_s=0.25,
        thought_words=int(_THOUGHT * words_of_a_turn),
        call_words=int((1 - _THOUGHT - _RESULT) * words_of_a_turn),
        result_words=int(_RESULT * words_of_a_turn),
    )


def model_folder(template: str, folder: Path) -> Path:
    """The demo's model with this template."""
    model = folder / template
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    long = {**config, "max_position_embeddings": 2**20}
    (model / "config.json").write_text(json.dumps(long))
    if template == "rewriting":
        file = model / "chat_template.jinja"
        whole = file.read_text(encoding="utf-8")
        forgetful = whole.replace(*_FORGETFUL, 1)
        assert forgetful != whole, "the demo's template has changed"
        file.write_text(forgetful, encoding="utf-8")
    return model


def measure(template: str, at_once: int, turns: int, tokens: int) -> dict[str, Any]:
    """One run of a sampler, in this process."""
    from sampler import Addresses, run_sampler

    script = script_of(turns, tokens)
    loop, memory = LoopWatch(), MemoryWatch()
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongod(Path(folder) / "data", Path(folder) / "mongod.log") as mongod,
        model_service(script) as service,
        tool_server() as tools,
    ):
        model = model_folder(template, Path(folder))

        async def watched() -> dict[str, Any]:
            measured = await run_sampler(
                Addresses(mongod.url, service, tools),
                at_once,
                at_once,
                model=model,
                flags=["--max_tokens", str(20 * tokens), "--max_prompt_tokens", str(2 * tokens)],
                watches=(loop.watch, memory.watch),
            )
            return {
                "cpu_s_per_record": round(measured.cpu_s / at_once, 3),
                "mb_per_record": round((memory.most - memory.before) / at_once / 1e6, 2),
                "stored_mb_per_record": round(measured.stored_bytes / at_once / 1e6, 2),
                "tokens_per_record": measured.tokens // at_once,
                "records_per_s": round(at_once / measured.wall_s, 2),
            }

        return {**uvloop.run(watched()), **loop.summary()}


def in_a_process(template: str, at_once: int, turns: int, tokens: int) -> dict[str, Any]:
    """`measure` in a new process, whose memory has no earlier peak."""
    call = [template, str(at_once), str(turns), str(tokens)]
    done = subprocess.run([sys.executable, __file__, *call], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the run of {' '.join(call)} failed: its messages are above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(turns: int, tokens: int, at_once: tuple[int, ...] = AT_ONCE) -> dict[str, Any]:
    """All runs, and the ratio of the costs of rewriting and appending."""
    runs: dict[str, dict[str, Any]] = {}
    ratios: dict[str, float] = {}
    for count in at_once:
        for template in TEMPLATES:
            runs[f"{template}_{count}"] = found = in_a_process(template, count, turns, tokens)
            print(f"{template}, {count} at once: {found}", flush=True)
        rewriting, appending = runs[f"rewriting_{count}"], runs[f"appending_{count}"]
        for cost in ("cpu_s_per_record", "mb_per_record", "stored_mb_per_record"):
            ratios[f"{cost}_{count}"] = round(rewriting[cost] / appending[cost], 2)
    return {
        "turns": turns,
        "tokens": tokens,
        "runs": runs,
        "loop_block_ms_p99": max(run["loop_block_ms_p99"] for run in runs.values()),
        "longest_task_ms_cpu": max(run["longest_task_ms_cpu"] for run in runs.values()),
        "ratios": ratios,
        "rewriting_over_appending": max(ratios.values()),
    }


if __name__ == "__main__":
    named, *numbers = sys.argv[1:]
    print(json.dumps(measure(named, *map(int, numbers))))
