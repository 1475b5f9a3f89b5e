"""`agentrl replay`: runs the programs of stored trajectories again, answered from the ledger.

    agentrl replay RUN RECORD        one program, whose output is printed
    agentrl replay RUN --check       a test: what today's program does otherwise than recorded

Nothing of the run changes. Without `--check`, services of `--inference_urls` answer what is not
recorded, if there are any; their answers are not stored.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from difflib import SequenceMatcher

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentrl.configs import Config, ConfigError
from agentrl.configs.verbs import replay_parser
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, Split, Task
from agentrl.gateway.program import ProgramResources, ProgramSampler
from agentrl.gateway.replaying import (
    UNFINISHED,
    Divergence,
    Replayed,
    Replayer,
    UnwrittenRecords,
)
from agentrl.inference.pool import ServicePool
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.database import launched_config, run_database
from agentrl.launcher.record_filter import (
    Filter,
    names_field,
    read_conditions,
    refused_by_mongod,
    selected,
)
from agentrl.rollout.agents import find_agent, load_agents

_AT_ONCE = 2 * (os.cpu_count() or 1)  # programs of a check
_CONTEXT = 3  # equal lines around a difference
_SHOWN_LINES = 40  # of a difference
_SHOWN_DIVERGENCES = 5


def main(argv: Sequence[str]) -> int:
    """`agentrl replay RUN [RECORD ...] [--check] [flags]`; returns the exit status.

    It is 1 if anything differed. Raises `ConfigError` for bad input.
    """
    given = replay_parser().parse(argv)
    own = given.own
    if own.records and (own.where or own.count):
        raise ConfigError("--where and --count choose among records: leave out the ids")
    conditions = read_conditions(own.where)
    config = launched_config(given)
    load_agents(config)
    live = bool(config.inference_urls) and not own.check
    console = TerminalConsole()

    async def replay() -> list[Replayed]:
        async with run_database(config, run_lives=True) as opened:
            database = opened.database
            if own.records:
                chosen = await _named(database, own.records)
            else:
                count = own.count or (0 if own.check else 1)
                split = Split(own.split)
                chosen = await _chosen(database, conditions, split, count, own.check)
            if not chosen:
                raise ConfigError(f"run {database.name} has no such record of a program")
            async with _replayer(config, database, live) as replayer:
                room = asyncio.Semaphore(_AT_ONCE if own.check else 1)

                async def one(record: Record) -> Replayed:
                    async with room:
                        task = await _task_of(database, record)
                        replayed = await replayer.replay(task, record)
                    if not own.check:
                        console.print(Rule(record.id, align="left", style="dim"))
                        console.print(Text(replayed.output))
                    return replayed

                return await asyncio.gather(*map(one, chosen))

    outcomes = asyncio.run(replay())
    print_replays(console, outcomes)
    return 1 if any(outcome.differences for outcome in outcomes) else 0


@asynccontextmanager
async def _replayer(config: Config, database: RunDatabase, live: bool) -> AsyncIterator[Replayer]:
    records = UnwrittenRecords(database)
    sampling = config.sampling
    async with (
        ServicePool(
            api_key=sampling.inference_api_key,
            request_timeout_s=sampling.request_timeout,
            patience_s=sampling.startup_timeout,
        ) as pool,
        ProgramSampler.open_resources(config, pool, records) as resources,
    ):
        assert isinstance(resources, ProgramResources)
        if live:
            pool.update(config.inference_urls)
        yield Replayer(config, resources, records, live)


async def _named(database: RunDatabase, ids: Sequence[str]) -> list[Record]:
    """The Records with these ids. Raises `ConfigError` if one is not a program's."""
    found = {
        document["_id"]: Record.from_mongo(document)
        async for document in database.records.find({"_id": {"$in": list(ids)}})
    }
    for name in ids:
        if name not in found:
            raise ConfigError(f"run {database.name} has no record {name!r}")
        if not _of_program(found[name]):
            raise ConfigError(
                f"record {name} is of agent {found[name].agent_name}: only those of programs can "
                "be replayed"
            )
    return [found[name] for name in ids]


async def _chosen(
    database: RunDatabase, conditions: Filter, split: Split, count: int, check: bool
) -> list[Record]:
    """Records of programs that match the conditions, newest first; `count` 0: all.

    A check compares finished ones, unless a condition is on the status.
    """
    filters = await selected(database, conditions, split)
    filters.append({"n_turns": {"$gt": 0}})
    if check and not names_field(conditions, "status"):
        filters.append({"status": {"$nin": list(UNFINISHED)}})
    chosen: list[Record] = []
    with refused_by_mongod():
        async for document in database.records.find({"$and": filters}).sort("started_at", -1):
            record = Record.from_mongo(document)
            if _of_program(record):
                chosen.append(record)
            if len(chosen) == count > 0:
                break
    return chosen


def _of_program(record: Record) -> bool:
    return record.agent_name is not None and issubclass(
        find_agent(record.agent_name), ProgramSampler
    )


async def _task_of(database: RunDatabase, record: Record) -> Task:
    document = await database.tasks.find_one({"_id": record.task})
    assert document is not None, f"{record.task} is gone, and the pipeline deletes nothing"
    return Task.from_mongo(document)


def print_replays(console: Console, outcomes: Sequence[Replayed]) -> None:
    """Print a line for each replay, and the requests at which programs diverged."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("record", no_wrap=True)
    table.add_column("turns", justify="right")
    table.add_column("result", overflow="fold")
    for outcome in outcomes:
        said = "; ".join(outcome.differences) or "as recorded"
        if outcome.sampled:
            said += f", then {outcome.sampled} turns by a service"
        turns = f"{outcome.asked} of {outcome.turns}"
        table.add_row(outcome.record, turns, Text(said, "red" if outcome.differences else "green"))
    console.print(table)
    differ = [outcome for outcome in outcomes if outcome.differences]
    console.print(f"{len(outcomes) - len(differ)} of {len(outcomes)} as recorded")
    diverged = [(outcome.record, outcome.divergence) for outcome in differ if outcome.divergence]
    for record, divergence in diverged[:_SHOWN_DIVERGENCES]:
        _print_divergence(console, record, divergence)
    if len(diverged) > _SHOWN_DIVERGENCES:
        console.print(f"{len(diverged) - _SHOWN_DIVERGENCES} more diverged")


def _print_divergence(console: Console, record: str, divergence: Divergence) -> None:
    """Print the request and the recorded one that is most like it, side by side."""
    if divergence.turn is None:
        console.print(Rule(f"{record}: a request after the last turn", align="left"))
        console.print(Text(_tail(divergence.prompt)))
        return
    console.print(Rule(f"{record}: diverged at turn {divergence.turn}", align="left"))
    table = Table(expand=True)
    table.add_column("recorded", ratio=1, overflow="fold")
    table.add_column("now", ratio=1, overflow="fold")
    for recorded, now in side_by_side(divergence.recorded_prompt, divergence.prompt):
        same = recorded == now
        table.add_row(
            Text(recorded, "dim" if same else "red"), Text(now, "dim" if same else "green")
        )
    for name in sorted({*divergence.params, *divergence.recorded_params}):
        before, after = divergence.recorded_params.get(name), divergence.params.get(name)
        if before != after:
            table.add_row(Text(f"{name}: {before}", "red"), Text(f"{name}: {after}", "green"))
    console.print(table)


def side_by_side(recorded: str, now: str) -> list[tuple[str, str]]:
    """The lines of two prompts beside each other, from shortly before the first difference.

    Long stretches of equal lines, and what is beyond the length that a person reads, are left out.
    """
    one, other = recorded.splitlines(), now.splitlines()
    rows: list[tuple[str, str]] = []
    if one == other:
        return rows
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        for _, start, end, begin, stop in group:
            left, right = one[start:end], other[begin:stop]
            length = max(len(left), len(right))
            rows += zip(
                left + [""] * (length - len(left)),
                right + [""] * (length - len(right)),
                strict=True,
            )
    if len(rows) > _SHOWN_LINES:
        rows = [*rows[:_SHOWN_LINES], (f"… {len(rows) - _SHOWN_LINES} more lines", "…")]
    return rows


def _tail(prompt: str) -> str:
    lines = prompt.splitlines()
    return "\n".join(lines[-2 * _CONTEXT :])
