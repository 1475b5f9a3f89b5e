"""`agentrl show`: prints one trajectory, a list of Records, or the tasks with failures."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from agentrl.configs import ConfigError
from agentrl.configs.verbs import SHOWN_RECORDS, show_parser
from agentrl.databases import outages
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    Replay,
    Split,
    ToolCall,
    TurnStatus,
)
from agentrl.databases.failed_tasks import COUNTED, FailedTask, count_failed_tasks, failed_tasks
from agentrl.databases.quarantine import QuarantinedItem, count_quarantined, list_quarantined
from agentrl.launcher.database import place_config, run_database
from agentrl.launcher.record_filter import read_conditions
from agentrl.launcher.show_list import list_records, print_list

_SHOWN_FAILURES = 100  # largest number of tasks, and of items of each kind in quarantine
_ROLE_STYLES = {"system": "dim", "user": "cyan"}


def main(argv: Sequence[str]) -> int:
    """Run `agentrl show RUN [RECORD | --list | --failed]`; returns the exit status.

    Raises `ConfigError` if the run or the record does not exist.
    """
    given = show_parser().parse(argv)
    arguments = given.own
    conditions = read_conditions(arguments.where)
    listing = arguments.order or arguments.where or arguments.count
    if listing and (arguments.record or arguments.failed):
        raise ConfigError("--where and --count choose among records: leave out the id or --failed")
    config = place_config(given)

    async def show() -> None:
        async with run_database(config, run_lives=True) as opened:
            database = opened.database
            if arguments.failed:
                console = Console()
                n_failed = await count_failed_tasks(database)
                tasks = await failed_tasks(database, _SHOWN_FAILURES)
                print_failed_tasks(console, tasks, n_failed)
                in_quarantine = (await count_quarantined(database)).total
                items = await list_quarantined(database, _SHOWN_FAILURES)
                print_quarantined(console, arguments.run, items, in_quarantine)
                return
            if listing:
                records = await list_records(
                    database, arguments.order or "newest", conditions, Split(arguments.split),
                    arguments.count or SHOWN_RECORDS,
                )  # fmt: skip
                print_list(Console(), records, config.run.run_name)
                return
            for outage in await outages.current(database):
                Console().print(Text(outage.sentence(datetime.now(UTC)), "red"), soft_wrap=True)
            n_failed = await count_failed_tasks(database)
            failed = f"{_counted(n_failed)} tasks have failures: "
            failed += f"`agentrl show {arguments.run} --failed`"
            try:
                record = await find_record(database, arguments.record, Split(arguments.split))
            except ConfigError as error:
                raise ConfigError(f"{error}; {failed}" if n_failed else f"{error}") from None
            turns = await read_turns(database, record)
            answer = await right_answer(database, record)
        print_record(Console(), record, turns, answer)
        if n_failed:
            Console().print(Text(failed, "yellow"))

    asyncio.run(show())
    return 0


async def find_record(database: RunDatabase, record_id: str | None, split: Split) -> Record:
    """The Record with the given id; for None the split's newest one with a score.

    Raises `ConfigError` if there is none.
    """
    if record_id is not None:
        document = await database.records.find_one({"_id": record_id})
        if document is None:
            raise ConfigError(f"run {database.name} has no record {record_id!r}")
    else:
        document = await database.records.find_one(
            {"split": split, "score": {"$ne": None}}, sort=[("finished_at", -1)]
        )
        if document is None:
            other = Split.EVAL if split == Split.TRAIN else Split.TRAIN
            there = await database.records.find_one({"split": other, "score": {"$ne": None}})
            hint = "" if there is None else f": it has some of split {other}, see --split {other}"
            raise ConfigError(
                f"run {database.name} has no finished record of split {split} yet{hint}"
            )
    return Record.from_mongo(document)


async def read_turns(database: RunDatabase, record: Record) -> list[DispatchedSamplingTask]:
    """The Record's turns, in order."""
    cursor = database.turns.find({"record_id": record.id}).sort("turn", 1)
    return [DispatchedSamplingTask.from_mongo(document) async for document in cursor]


async def right_answer(database: RunDatabase, record: Record) -> str | None:
    """The right answer of the Record's task; None if the task has none."""
    task = await database.tasks.find_one({"_id": record.task}, {"answer": 1})
    return None if task is None else task["answer"]


def print_record(
    console: Console,
    record: Record,
    turns: Sequence[DispatchedSamplingTask],
    answer: str | None = None,
) -> None:
    """Print a Record: facts, conversation and score. `answer`: the task's right answer."""
    versions = record.versions
    facts = [
        f"task {record.task_id}, rollout {record.rollout} of its group, {record.split} epoch"
        f" {record.epoch}" + (f", agent {record.agent_name}" if record.agent_name else ""),
        f"{record.n_turns} turns, {record.n_tool_calls} tool calls ({record.n_tool_errors} errors),"
        f" {record.tokens.generated} tokens generated",
    ]
    if record.fork is not None:
        facts.append(f"a fork of {record.fork.record} at turn {record.fork.turn}")
    if record.replay is not None:
        facts.append(_replayed(record.replay))
    if versions is not None:
        facts.append(f"policy versions {versions.min} to {versions.max}")
    if record.tools_offered:
        facts.append(f"tools in the prompt: {', '.join(record.tools_offered)}")
    console.print(Panel(Text("\n".join(facts)), title=record.id))
    if record.own_calls:
        console.print(Rule("calls that belong to no turn", align="left", style="dim"))
        _print_calls(console, record.own_calls)
    answered = True
    for turn in turns:
        for message in turn.messages:
            if message.get("role") == "tool" and answered:
                continue  # shown with its call
            role = str(message.get("role"))
            console.print(Rule(role, align="left", style="dim"))
            console.print(Text(str(message.get("content") or ""), _ROLE_STYLES.get(role, "")))
        if turn.rewrite is not None:
            told = Rule(f"conversation rewritten: {turn.rewrite}", align="left", style="yellow")
            console.print(told)
        parts = [
            f"turn {turn.turn}",
            "" if turn.status == TurnStatus.COMPLETED else turn.status,
            turn.agent or "",
            f"by {turn.service}" if turn.agent and not turn.output_ids else "",
            "" if turn.trained else "not trained",
            "" if turn.replayed is None else f"replayed from {turn.replayed}",
        ]
        head = " · ".join(["assistant", *filter(None, parts)])
        console.print(Rule(head, align="left", style="dim"))
        console.print(Text(turn.output_text, "bold"))
        if turn.format_error:
            console.print(Text(f"not understood: {turn.format_error}", "red"))
        _print_calls(console, turn.tool_calls)
        # Calls that a program made itself: their results are messages of a later turn.
        answered = all(call.result is not None for call in turn.tool_calls)
    console.print(Rule(style="dim"))
    if record.error:
        console.print(Text(f"failed: {record.error}", "red"))
    else:
        advantage = "" if record.advantage is None else f" · advantage {record.advantage:+.3f}"
        console.print(
            Text.assemble(
                ("answer ", "dim"), (str(record.final_answer), "bold"),
                (f" · {record.stop_reason} · score ", "dim"), (f"{record.score}", "bold"),
                (advantage, "dim"),
            )
        )  # fmt: skip
    if answer is not None:
        console.print(Text.assemble(("right answer ", "dim"), (answer, "bold")))
    if len(record.scores) > 1 or record.explanations:
        for scorer, score in record.scores.items():
            explanation = record.explanations.get(scorer, "")
            console.print(Text.assemble(f"  {scorer} {score}", (f"  {explanation}", "dim")))
    for agent, reward in record.agent_rewards.items():
        own = record.agent_advantages.get(agent)
        said = f"  agent {agent} · reward {reward:g}"
        console.print(Text(said + ("" if own is None else f" · advantage {own:+.3f}"), "dim"))
    if record.left_out:
        console.print(Text(f"  not trained: {record.left_out}", "dim"))


def _replayed(replay: Replay) -> str:
    """How much of a Record was answered by stored turns."""
    told = f"{replay.turns} turns, {replay.tokens} tokens replayed from the ledger"
    return told if replay.diverged is None else f"{told}; diverged at turn {replay.diverged}"


def _print_calls(console: Console, calls: Sequence[ToolCall]) -> None:
    """Print one line for each call and its result. Calls by the agent's code are marked."""
    for call in calls:
        if not call.name:
            continue  # it could not be parsed; the turn has the error
        arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
        style = "red" if call.is_error else "green"
        took = f"   {call.latency_s * 1000:.0f} ms"
        known = call.result is not None
        result = [("  ⇒  ", "dim"), (str(call.result), style), (took, "dim")] if known else []
        console.print(
            Text.assemble(
                ("  agent → " if call.by_agent else "  → ", "dim"),
                f"{call.name}({arguments})",
                *result,
            )
        )


def _counted(n_failed: int) -> str:
    return f"{n_failed} or more" if n_failed == COUNTED else str(n_failed)


def print_failed_tasks(console: Console, tasks: Sequence[FailedTask], n_failed: int) -> None:
    """Print two lines for each task: how many of its rollouts failed, and the last error.

    `n_failed`: number of all tasks with failures, of which `tasks` are the last ones.
    """
    if not tasks:
        console.print("no rollout and no group of this run failed")
    elif n_failed > len(tasks):
        console.print(f"the last {len(tasks)} of {_counted(n_failed)} tasks with failures:")
    for task in tasks:
        failed = [
            f"{task.failed} of {task.rollouts} given up" if task.failed else "",
            f"{task.quarantined} of {task.rollouts} not scored" if task.quarantined else "",
            f"{task.again} of {task.rollouts} tried again" if task.again else "",
            "group not finalised" if task.group else "",
        ]
        head = f"task {task.task_id}, {task.split} epoch {task.epoch}: "
        head += ", ".join(filter(None, failed))
        head += f"; last record {task.record}" if task.record else ""
        # Not cut, because an error ends with its place in a file.
        console.print(Text(head), soft_wrap=True)
        console.print(Text(f"    {task.error}", "red"), soft_wrap=True)


def print_quarantined(
    console: Console, run: str, items: Sequence[QuarantinedItem], in_quarantine: int
) -> None:
    """Print two lines for each item in quarantine, and the command that releases them.

    `in_quarantine`: number of all items in quarantine, of which `items` are some.
    """
    if in_quarantine > len(items):
        console.print(f"{len(items)} of {in_quarantine} in quarantine:")
    for item in items:
        console.print(Text(f"{item.kind} {item.id} is in quarantine"), soft_wrap=True)
        console.print(Text(f"    {item.error}", "red"), soft_wrap=True)
    if items:
        console.print(Text(f"`agentrl release {run}` puts back what is in quarantine"))
