"""Chaos: a run on hosts of its own, faults drawn from a seed, and what is left checked in full.

    python tests/chaos/run.py [--seconds 300] [--faults 44] [--calm 45] [--seed 0] [--save]

A replica set of three mongods, tools, a judge, two services, two samplers and the trainer, each on
a network of its own (`network.py`, `fleet.py`), started again when they die, as systemd would.
Faults: kill -9 of any of them (of the replica set, the primary), SIGSTOP for two leases, the
network of one host cut for two leases, the primary stepped down, all tools gone, a judge that
answers 500 or NaN, a service that comes back with a shorter context than was asked for. All the
time one task's agent raises, and another's scorer. When the faults are over the run is let end with
the tasks it has, and `verify.py` reads every document of it.

Before and after the faults the run has `--calm` seconds without any: what it gets done then is
compared with what it gets done under faults (`throughput.py`).

The last line is a JSON object; the exit status is 1 if anything was lost, doubled or late. Logs
and data stay in `--folder`, or else go with a run in which nothing was wrong.
"""

import argparse
import datetime
import heapq
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import judge
from chaos_tasks import is_good
from faults import Fault, Kind, draw_faults
from fleet import MAX_STALENESS, REPOSITORY, ROWS_PER_STEP, Fleet, FleetError
from network import Network, NetworkUnavailable
from throughput import Window, good_rollouts_per_s
from verify import RunState, task_violations, token_ages, violations

RESULTS = REPOSITORY / "benchmarks" / "results" / "chaos.json"
_START_S = 120.0
_RECOVERY_S = 10.0  # after the last fault, before it counts as calm again
_SHOWN = 20


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="how long faults are injected")
    parser.add_argument("--faults", type=int, default=44, help="how many")
    parser.add_argument("--calm", type=float, default=45, help="seconds without, before and after")
    parser.add_argument("--seed", type=int, default=0, help="which, and when")
    parser.add_argument("--lease", type=float, default=4.0, help="lease of samplers and trainer")
    parser.add_argument("--folder", type=Path, help="keep logs and data here")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Network() as network:
            fleet = Fleet(network, folder.resolve(), lease_s=arguments.lease)
            try:
                result = run(fleet, arguments)
            finally:
                fleet.end()
    except (NetworkUnavailable, FleetError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    if arguments.save:
        RESULTS.write_text(json.dumps({**_where(), **result}, indent=1) + "\n")
    if result["violations"]:
        print(f"logs and data are in {folder}")
    elif arguments.folder is None:
        shutil.rmtree(folder)
    print(json.dumps(result))
    return 1 if result["violations"] else 0


def run(fleet: Fleet, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start, inject, let it end, verify. Raises `FleetError` if it does not start or end."""
    seconds, count, seed = arguments.seconds, arguments.faults, arguments.seed
    targets = ["mongod", *(name for name in fleet.members if not name.startswith("mongod"))]
    faults = draw_faults(seed, count, seconds, targets, fleet.lease_s)
    began = time.monotonic()
    fleet.start()
    fleet.wait(lambda: fleet.steps() >= 1, _START_S, "the first step")
    print(f"{time.monotonic() - began:5.0f} s  the run is at work, calm first", flush=True)
    before = let_be(fleet, arguments.calm)
    print(f"{time.monotonic() - began:5.0f} s  {count} faults begin", flush=True)
    began, steps = time.monotonic(), fleet.steps()
    disturbed_from = now()
    inject(fleet, faults, began, seconds)
    disturbed = Window(disturbed_from, now())
    steps = fleet.steps() - steps
    print(f"{time.monotonic() - began:5.0f} s  faults are over after {steps} steps", flush=True)
    let_be(fleet, _RECOVERY_S)
    after = let_be(fleet, arguments.calm)
    fleet.finish(120 + seconds)
    elapsed = time.monotonic() - began
    state = read_state(fleet)
    wrong = [
        *violations(state, MAX_STALENESS, ROWS_PER_STEP),
        *task_violations(state.tasks, state.records),
    ]
    calm_rate = good_rollouts_per_s(state.records, [before, after])
    rate = good_rollouts_per_s(state.records, [disturbed])
    for sentence in wrong[:_SHOWN]:
        print(f"WRONG: {sentence}")
    ages = Counter(token_ages(state.rows, state.policy_versions).values())
    return {
        "violations": len(wrong),
        "good_rollouts_per_s": {
            "undisturbed": round(calm_rate, 2),
            "undisturbed_before": round(good_rollouts_per_s(state.records, [before]), 2),
            "undisturbed_after": round(good_rollouts_per_s(state.records, [after]), 2),
            "under_faults": round(rate, 2),
            "ratio": round(rate / calm_rate, 2) if calm_rate else None,
        },
        "seed": seed,
        "seconds": round(elapsed, 1),
        "fault_seconds": seconds,
        "faults": len(faults),
        "faults_by_kind": dict(sorted(Counter(fault.title for fault in faults).items())),
        "restarts": {name: member.deaths for name, member in fleet.members.items()},
        "steps_under_faults": steps,
        "steps": state.run["step"],
        "groups": len(state.tasks),
        "slots_of_broken_tasks": dict(
            Counter(
                f"{task['task_id']}: {slot['status']}"
                for task in state.tasks
                for slot in task["slots"]
                if not is_good(task["task_id"])
            )
        ),
        "stop_reasons": dict(Counter(str(record["stop_reason"]) for record in state.records)),
        "slots": dict(Counter(s["status"] for task in state.tasks for s in task["slots"])),
        "records": dict(Counter(record["status"] for record in state.records)),
        "rows": dict(Counter(row["status"] for row in state.rows)),
        "rows_by_staleness": {str(age): n for age, n in sorted(ages.items(), key=str)},
        "max_staleness": max((age for age in ages if age is not None), default=None),
    }


def now() -> datetime.datetime:
    """This machine's clock, which stamps the records too."""
    return datetime.datetime.now(datetime.UTC)


def let_be(fleet: Fleet, seconds: float) -> Window:
    """Look after the members for a while, and do nothing to them."""
    began, until = now(), time.monotonic() + seconds
    while time.monotonic() < until:
        fleet.poll()
        time.sleep(0.05)
    return Window(began, now())


def inject(fleet: Fleet, faults: list[Fault], began: float, seconds: float) -> None:
    """Do each fault at its time and undo it when it is over; returns when all are."""
    undo: list[tuple[float, int, Fault, str]] = []
    todo = list(faults)
    while todo or undo or time.monotonic() - began < seconds:
        at = time.monotonic() - began
        while todo and todo[0].at_s <= at:
            fault = todo.pop(0)
            print(
                f"{at:5.0f} s  step {fleet.steps()}: {fault.kind} {fault.target}, "
                f"{fault.lasts_s:.1f} s",
                flush=True,
            )
            target = _do(fleet, fault)
            heapq.heappush(undo, (fault.ends_s, id(fault), fault, target))
        while undo and undo[0][0] <= at:
            _, _, fault, target = heapq.heappop(undo)
            _undo(fleet, fault.kind, target)
        fleet.poll()
        time.sleep(0.05)


def _do(fleet: Fleet, fault: Fault) -> str:
    """Returns the member that it befalls: of the replica set, the primary."""
    name = fleet.primary() if fault.target == "mongod" else fault.target
    member = fleet.members[name]
    match fault.kind:
        case Kind.KILL:
            member.kill(fault.lasts_s)
        case Kind.STOP:
            member.stop()
        case Kind.CUT:
            member.host.cut()
        case Kind.STEP_DOWN:
            fleet.step_down()
        case Kind.ERROR:
            fleet.judge_mode.write_text(judge.ERROR)
        case Kind.NONSENSE:
            fleet.judge_mode.write_text(judge.NONSENSE)
        case Kind.SHORT_CONTEXT:
            fleet.shorten_context(name)
    return name


def _undo(fleet: Fleet, kind: Kind, name: str) -> None:
    member = fleet.members[name]
    match kind:
        case Kind.KILL | Kind.STEP_DOWN:
            pass  # it is started again by `poll`; another one was elected
        case Kind.STOP:
            member.resume()
        case Kind.CUT:
            member.host.join()
        case Kind.ERROR | Kind.NONSENSE:
            fleet.judge_mode.write_text(judge.RIGHT)
        case Kind.SHORT_CONTEXT:
            fleet.restore_context(name)


def read_state(fleet: Fleet) -> RunState:
    """All documents of the run's training."""
    with fleet.database() as documents:
        run = documents["runs"].find_one({"_id": fleet.name})
        assert run is not None, "the run has no document"
        return RunState(
            run=run,
            tasks=list(documents["tasks"].find({"split": "train"})),
            records=list(documents["records"].find({"split": "train"})),
            turns=list(documents["dispatched_sampling_tasks"].find()),
            rows=list(documents["record_data"].find()),
            policy_versions=list(documents["policy_versions"].find()),
        )


def _where() -> dict[str, Any]:
    """Date, machine and versions."""
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.machine(),
    )  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("pymongo", "torch", "transformers", "mcp")},
        },
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
