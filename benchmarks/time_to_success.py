"""Wall time from the command to a trained model: this project's demo and the same demo in TRL.

Both train the demo's model on its tasks with its tools, 128 rows a step, 40 steps, the same loss
and evaluations (96 held-out tasks, 4 rollouts each, at the start and every 10 steps). This
project's run is `agentrl launch grpo demo`: MongoDB, an inference service, samplers and the trainer
as processes, with the tools in the samplers. TRL's run (`trl_demo.py`) is one process, which
generates with transformers and calls the tools itself. Two settings: tools that answer at once, and
`--slow`, tools that take 0.3 s in the median, with a heavy tail, in a server of their own, and one
rollout of each held-out task. TRL calls the tools of different rollouts one after the other, so
that its step takes four minutes there, in which it sleeps; `--side` measures one side alone, beside
the other's saved runs.

    python benchmarks/time_to_success.py [--slow] [--side ours|trl] [--seeds 3] [--steps 40]
        [--quick] [--save]

The runs of both sides alternate. `over_trl` (`over_trl_slow_tools`) is the ratio of the seconds to
a held-out success of 0.9, the median over the seeds. A success between two evaluations counts from
the later one. `cpu_s`: CPU seconds by process; `cpu_ms_per_turn`: of all sampled turns. It takes
2 minutes a seed, and needs the machine for itself. The saved run with `--slow` took 5,198 s for 20
steps of TRL, and 317 s for 40 steps here.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from report import RESULTS, finish, parse_flags

from agentrl.databases.connection import connect
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.held_port import HeldPort

RUN = "demo"
GOAL = 0.9
EVAL_STEPS = 10
AT_ONCE = 128  # trajectories; TRL generates those of a step at once too
SLOW_S = 0.3  # median of a slow call
SIDES = ("ours", "trl")
POLL_S = 0.25
LIMIT_S = 4 * 3600.0  # of one run
TOOLS = Path(__file__).parents[1] / "assets" / "demo" / "tool_server.py"
# The processes of this project's run, by what their command line holds.
ROLES = {
    "mongod --dbpath": "mongod", "tool_server": "tools", " serve ": "engine", " sample ": "sampler",
    " train ": "trainer", "accelerate": "trainer", " launch ": "launcher",
}  # fmt: skip


@dataclass
class Course:
    """What one run reported. Times are seconds since its command."""

    began: float  # seconds since the epoch
    rewards: list[tuple[float, float]] = field(default_factory=list)  # (time, mean reward)
    held_out: list[tuple[float, float]] = field(default_factory=list)  # (time, success)
    cpu_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    turns: int | None = None

    def add(self, said: dict[str, Any]) -> None:
        """Take one line of a run's report."""
        at = said["time"] - self.began
        if "reward" in said:
            self.rewards.append((at, said["reward"]))
        if "held_out" in said:
            self.held_out.append((at, said["held_out"]))

    def summary(self) -> dict[str, Any]:
        """The reported figures."""
        steps = [at for at, _ in self.rewards]
        cpu_s = {role: round(spent, 1) for role, spent in sorted(self.cpu_s.items())}
        turns = self.turns
        return {
            "steps": len(steps),
            "first_step_s": round(steps[0], 1),
            "step_s": round(statistics.median(b - a for a, b in pairwise(steps)), 2),
            "reward_goal_s": _reached(self.rewards),
            "held_out_goal_s": _reached(self.held_out),
            "held_out": [[round(at, 1), round(value, 3)] for at, value in self.held_out],
            "seconds": round(self.seconds, 1),
            "cpu_s": cpu_s,
            "turns": turns,
            "cpu_ms_per_turn": turns and {r: round(1000 * s / turns, 2) for r, s in cpu_s.items()},
        }


def _reached(values: list[tuple[float, float]]) -> float | None:
    """When the goal was reached first; None if it was not."""
    return next((round(at, 1) for at, value in values if value >= GOAL), None)


class CpuWatch:
    """CPU seconds of a process and its descendants, by role. Call `look` until they end."""

    def __init__(self, pid: int, role_of: Callable[[str], str]) -> None:
        self._root = psutil.Process(pid)
        self._role_of = role_of
        self._spent: dict[tuple[int, float], tuple[str, float]] = {}

    def look(self) -> None:
        """Read the CPU times of the processes that run now."""
        try:
            found = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in found:
            try:
                times = process.cpu_times()
                key = process.pid, process.create_time()
                # One that has ended, and was not waited for yet, has no command line any more.
                command = " ".join(process.cmdline())
                role = self._role_of(command + " ") if command else self._spent[key][0]
                self._spent[key] = (role, times.user + times.system)
            except (psutil.NoSuchProcess, psutil.ZombieProcess, KeyError):
                continue  # its last reading stands, if there was one

    def by_role(self) -> dict[str, float]:
        """The sums of the last readings."""
        spent: dict[str, float] = {}
        for role, seconds in self._spent.values():
            spent[role] = spent.get(role, 0.0) + seconds
        return spent


def _role(command: str) -> str:
    return next((role for mark, role in ROLES.items() if mark in command), "other")


def run_ours(seed: int, steps: int, eval_rollouts: int, tools: str | None, folder: Path) -> Course:
    """One run of this project's demo. `tools`: the URL of slow tools; None: the demo's own."""
    output = folder / "run"
    command = [
        sys.executable, "-m", "agentrl.cli", "launch", "grpo", RUN, "--output_dir", str(output),
        "--max_steps", str(steps), "--eval_steps", str(EVAL_STEPS), "--seed", str(seed),
        "--eval_rollouts", str(eval_rollouts),
        "--max_concurrent_samples_per_process", str(AT_ONCE),
        *(("--mcp_manager_url", tools) if tools else ()),
    ]  # fmt: skip
    course = _watched(command, folder / "ours.log", _role)
    for line in (output / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        course.add({"time": metrics["time"], "reward": metrics["reward_mean"]})
    with EmbeddedMongod(output / "mongo", folder / "mongod.log") as mongod:
        asyncio.run(_read_run(mongod.url, course))
    return course


async def _read_run(url: str, course: Course) -> None:
    """Read the times of evaluations, and the number of turns, from the run's database."""
    database = await connect(url, RUN)
    try:
        cursor = await database.tasks.aggregate(
            [
                {"$match": {"split": "eval"}},
                {"$unwind": "$slots"},
                {
                    "$group": {
                        "_id": "$epoch",
                        "ended": {"$max": "$completed_at"},
                        # A rollout without a score is a failure, as TRL counts it.
                        "success": {"$avg": {"$ifNull": ["$slots.score", 0]}},
                    }
                },
                {"$sort": {"_id": 1}},
            ]
        )
        async for group in cursor:
            course.add({"time": group["ended"].timestamp(), "held_out": group["success"]})
        course.turns = await database.turns.count_documents({})
    finally:
        await database.close()


def run_trl(seed: int, steps: int, eval_rollouts: int, slow: bool, folder: Path) -> Course:
    """One run of TRL."""
    settings = {
        "steps": steps, "seed": seed, "eval_steps": EVAL_STEPS, "eval_rollouts": eval_rollouts,
        "tool_seconds": SLOW_S if slow else 0.0,
    }  # fmt: skip
    script = str(Path(__file__).with_name("trl_demo.py"))
    log = folder / "trl.log"
    course = _watched([sys.executable, script, json.dumps(settings)], log, lambda _: "trainer")
    for line in log.read_text().splitlines():
        if line.startswith('{"time"'):
            course.add(json.loads(line))
    return course


def _watched(command: list[str], log: Path, role_of: Callable[[str], str]) -> Course:
    """Run a command to its end. Raises `SystemExit` with its last lines if it fails."""
    course = Course(began=time.time())
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, process_group=0)
        watch = CpuWatch(process.pid, role_of)
        try:
            while process.poll() is None:
                if time.time() - course.began > LIMIT_S:
                    raise SystemExit(f"{command[1]} took longer than {LIMIT_S:g} s")
                watch.look()
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{' '.join(command[:4])} ended with {process.returncode}:\n{tail}")
    course.seconds, course.cpu_s = time.time() - course.began, watch.by_role()
    return course


@contextmanager
def _slow_tools() -> Iterator[str]:
    """The demo's tools, slow, as a server of their own; yields its URL."""
    with HeldPort() as port:
        server = subprocess.Popen(
            [sys.executable, str(TOOLS), "--port", str(port.number), "--seconds", str(SLOW_S)]
        )
        try:
            yield f"http://127.0.0.1:{port.number}/mcp"
        finally:
            server.terminate()
            server.wait()


def measure(side: str, seed: int, steps: int, slow: bool) -> dict[str, Any]:
    """One run of one side: its summary."""
    eval_rollouts = 1 if slow else 4
    with tempfile.TemporaryDirectory() as named, ExitStack() as stack:
        folder = Path(named)
        if side == "trl":
            course = run_trl(seed, steps, eval_rollouts, slow, folder)
        else:
            tools = stack.enter_context(_slow_tools()) if slow else None
            course = run_ours(seed, steps, eval_rollouts, tools, folder)
    summary = {"seed": seed, **course.summary()}
    print(f"{side}: {summary}", file=sys.stderr, flush=True)
    return summary


def _ratio(runs: dict[str, list[dict[str, Any]]], goal: str) -> dict[str, Any]:
    """Ours over TRL's, the median over the seeds that both sides ran and brought to the goal."""
    ours, trl = ({run["seed"]: run[goal] for run in runs[side]} for side in SIDES)
    ratios = [ours[seed] / trl[seed] for seed in ours if ours[seed] and trl.get(seed)]
    ratio = round(statistics.median(ratios), 3) if ratios else None
    return {"over_trl": ratio, "seeds_that_reached_the_goal": len(ratios)}


def main() -> None:
    """Measure and report."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--slow", action="store_true", help=f"tools take {SLOW_S} s (median)")
        parser.add_argument("--side", choices=SIDES, help="the other's runs are the saved ones")
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--steps", type=int, default=40)

    flags = parse_flags(__doc__ or "", add=add)
    seeds, steps = (1, 3) if flags.quick else (flags.seeds, flags.steps)
    name = "time_to_success" + ("_slow_tools" if flags.slow else "")
    saved = RESULTS / f"{name}.json"
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    if flags.side and saved.exists():
        runs |= json.loads(saved.read_text())["runs"]
        runs[flags.side] = []
    for seed in range(seeds):
        for side in (flags.side,) if flags.side else SIDES:
            runs[side].append(measure(side, seed, steps, flags.slow))
    result = {**_ratio(runs, "held_out_goal_s"), "runs": runs}
    if flags.slow:
        result["over_trl_slow_tools"] = result.pop("over_trl")
    finish(name, result, ("trl", "transformers", "torch", "pymongo"), save=flags.save)


if __name__ == "__main__":
    main()
