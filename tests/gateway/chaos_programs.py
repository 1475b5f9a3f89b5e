"""Chaos for programs from outside: gateway, programs, service and database are killed in turn.

    python tests/gateway/chaos_programs.py --seconds 300 --sessions 32

Sessions of several turns go on through it. In the end each slot has one result, each turn that the
ledger has of a finished session is what its program was told, in order, and none is doubled. The
last line of the output says what was measured, as JSON; the exit status is 0 if nothing was wrong.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.databases import runs
from agentrl.databases.connection import connect
from agentrl.databases.documents import Split, TaskStatus
from agentrl.databases.feeder import make_tasks
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.held_port import HeldPort

_TESTS = Path(__file__).parents[1]
for _folder in ("rollout", "chaos"):
    sys.path.insert(0, str(_TESTS / _folder))  # `scripted_run`, `verify`

from outside_run import CLIENTS  # noqa: E402
from scripted_run import DEMO_MODEL, begin_run  # noqa: E402
from verify import row_violations, slot_violations, token_violations  # noqa: E402

HERE = Path(__file__).parent
RUN = "chaos"
PROGRAMS = 4
FAULTS = ("gateway", "program", "service", "gateway", "database")
FED = 16  # groups that wait at any time
MOVES = 5  # answers that programs have between two faults, at least


class Fleet:
    """The processes of the run, by name."""

    def __init__(self, folder: Path, sessions: int) -> None:
        self.folder = folder
        self.database = EmbeddedMongod(folder / "data", folder / "mongod.log")
        self.ports = {name: HeldPort() for name in ("gateway", "service")}
        gateway = f"http://127.0.0.1:{self.ports['gateway'].number}"
        self.service_url = f"http://127.0.0.1:{self.ports['service'].number}"
        self.commands = {
            "service": [str(HERE / "chaos_service.py"), str(self.ports["service"].number)],
            "gateway": [
                "-m", "agentrl.cli", "gateway", "--run_name", RUN, "--agent_name", "outside",
                "--model_name_or_path", str(DEMO_MODEL), "--num_generations", "2",
                "--gateway_port", str(self.ports["gateway"].number), "--session_idle", "15",
                "--lease_seconds", "20", "--max_failures", "100", "--max_staleness", "1000",
                "--drop_zero_advantage", "false", "--max_failures_without_success", "0",
                "--max_turns", "50",
            ],
        }  # fmt: skip
        for number in range(PROGRAMS):
            self.commands[f"program-{number}"] = [
                str(HERE / "chaos_program.py"), gateway, str(sessions // PROGRAMS),
                str(folder / f"told-{number}.jsonl"),
            ]  # fmt: skip
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *self.commands[name]], stdout=log, stderr=log,
                env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CLIENTS), "OMP_NUM_THREADS": "1",
                     "DB_URL": self.database.url},
            )  # fmt: skip

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    async def gets_on(self) -> None:
        """Return when programs have been told something since the call."""
        before, deadline = sum(1 for _ in self.told()), time.monotonic() + 240
        while sum(1 for _ in self.told()) < before + MOVES:
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing gets on; logs are in {self.folder}")
            await asyncio.sleep(0.5)

    def told(self) -> Iterator[dict[str, Any]]:
        """What the programs were told. A line that was being written when one was killed is not
        whole."""
        for file in sorted(self.folder.glob("told-*.jsonl")):
            for line in file.read_text().splitlines():
                if line.endswith("}"):
                    yield json.loads(line)


async def main(seconds: float, sessions: int, pause_s: float, seed: int, folder: Path) -> int:
    fleet = Fleet(folder, sessions)
    fleet.database.start()
    try:
        return await _run(fleet, seconds, sessions, pause_s, random.Random(seed))
    finally:
        for name in fleet.running:
            fleet.kill(name)
        fleet.database.stop()


async def _run(
    fleet: Fleet, seconds: float, sessions: int, pause_s: float, draw: random.Random
) -> int:
    database = await connect(fleet.database.url, RUN)
    lease = await begin_run(database, service=fleet.service_url)
    fed = await _feed(database, 0, FED)
    for name in fleet.commands:
        fleet.start(name)
    began, faults = time.monotonic(), Counter[str]()
    turn = 0
    while time.monotonic() - began < seconds or turn < len(FAULTS):
        await fleet.gets_on()
        await asyncio.sleep(draw.uniform(0, 2) * pause_s)
        fault = FAULTS[turn % len(FAULTS)]
        turn += 1
        faults[fault] += 1
        down_s = draw.uniform(0.2, 3.0)
        if fault == "database":
            fleet.database.kill()
            await asyncio.sleep(down_s)
            await asyncio.to_thread(fleet.database.start)
        else:
            name = f"program-{draw.randrange(PROGRAMS)}" if fault == "program" else fault
            fleet.kill(name)
            await asyncio.sleep(down_s)
            fleet.start(name)
        left = await database.tasks.count_documents({"status": TaskStatus.CREATED})
        fed = await _feed(database, fed, fed + max(0, FED - left))
    # What was begun comes to its end, and what was not is taken out.
    await database.tasks.delete_many({"status": TaskStatus.CREATED})
    deadline = time.monotonic() + 240
    while await database.tasks.count_documents({"status": {"$ne": TaskStatus.COMPLETED}}):
        if time.monotonic() > deadline:
            print("the tasks were not completed in time")
            break
        await asyncio.sleep(0.5)
    await lease.progress(step=9, max_steps=9, version=0, status=runs.FINISHED)
    statuses = {}
    for name in ("gateway", *(name for name in fleet.running if name.startswith("program"))):
        try:
            statuses[name] = await asyncio.to_thread(fleet.running[name].wait, 120)
        except subprocess.TimeoutExpired:
            statuses[name] = None
    collections = {
        "tasks": database.tasks, "records": database.records, "turns": database.turns,
        "rows": database.rows,
    }  # fmt: skip
    documents = {name: [d async for d in of.find()] for name, of in collections.items()}
    await database.close()
    wrong = list(violations(documents, list(fleet.told())))
    wrong += [f"{name} ended with {status}" for name, status in statuses.items() if status != 0]
    for sentence in wrong[:20]:
        print(sentence)
    log = (fleet.folder / "gateway.log").read_text()
    kept = log.count("is answered from the ledger")
    records, turns = documents["records"], documents["turns"]
    finished = {record["_id"] for record in records if record["status"] in ("ready", "abandoned")}
    lost = [turn for turn in turns if turn["record_id"] not in finished]
    print(json.dumps({
        "violations": len(wrong),
        "faults": dict(faults),
        "sessions": sessions,
        "records": len(records),
        "finished": len(finished),
        "turns": len(turns),
        "turns_of_lost_attempts": len(lost),
        "answered_from_the_ledger": kept,
        "share_answered_from_the_ledger": round(kept / max(1, len(turns)), 4),
        "attempts_taken_over": sum(
            int(line.split("took over ")[1].split()[0])
            for line in log.splitlines() if "took over " in line
        ),
    }))  # fmt: skip
    return 1 if wrong else 0


async def _feed(database: Any, begin: int, end: int) -> int:
    lines = [
        TaskLine(id=f"line {n}", query=f"What is in bin {n}?", answer="x", scorer="exact_match")
        for n in range(end)
    ]
    ledger = TaskLedger(database, "feeder", lease_seconds=9, max_failures=1)
    await ledger.add(make_tasks(lines, Split.TRAIN, 0, 2, range(begin, end), first=begin))
    return max(begin, end)


def violations(
    documents: dict[str, list[dict[str, Any]]], told: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Everything that is wrong, one sentence each."""
    tasks, records, rows = documents["tasks"], documents["records"], documents["rows"]
    yield from slot_violations(tasks, records)
    yield from row_violations(records, rows)
    yield from token_violations(records, documents["turns"], rows)
    turns: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for turn in sorted(documents["turns"], key=lambda turn: turn["turn"]):
        turns[turn["record_id"]].append(turn)
    for session, of_session in turns.items():
        if [turn["turn"] for turn in of_session] != list(range(len(of_session))):
            yield f"the turns of {session} have gaps"
        digests = [turn["request"]["digest"] for turn in of_session]
        if len(set(digests)) != len(digests):
            yield f"{session} has two answers to one request"
    for line in told:
        session = line["session"]
        if "said" in line:
            stored = [
                turn["output_text"] for turn in turns[session][line["turn"] : line["turn"] + 1]
            ]
            if stored != [line["said"]]:
                yield f"{session} was told {line['said']!r}, and the ledger has {stored}"
        if "finished" in line:
            stored = [turn["output_text"] for turn in turns[session]]
            if stored != line["finished"]:
                yield f"{session} was told {line['finished']}, and the ledger has {stored}"
    by_id = {record["_id"]: record for record in records}
    for line in told:
        if "finished" in line and by_id[line["session"]]["status"] not in ("ready", "abandoned"):
            status = by_id[line["session"]]["status"]
            yield f"{line['session']} was finished by its program, and its Record is {status}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument(
        "--pause", type=float, default=4, help="seconds of work between faults, about"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where logs and data stay (default: nowhere)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-chaos-") as folder:
        sys.exit(
            asyncio.run(
                main(given.seconds, given.sessions, given.pause, given.seed,
                     given.folder or Path(folder))
            )
        )  # fmt: skip
