"""`agentrl show`: one trajectory as a person reads it, or the tasks that nothing came of."""

import asyncio
import os
from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentrl.configs import ConfigError
from agentrl.configs.parsing import Layer, config_of, layers_given, merged
from agentrl.configs.verbs import show_parser
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DispatchedSamplingTask, Record, Split, TurnStatus
from agentrl.databases.poison import PoisonTask, count_poison_tasks, poison_tasks
from agentrl.launcher.database import run_database
from agentrl.launcher.deployment import read_deployment

_ROLE_STYLES = {"system": "dim", "user": "cyan"}


def main(argv: Sequence[str]) -> int:
    """`agentrl show RUN [RECORD | --failed]`; returns the exit status.

    Raises for a name that is not there.
    """
    given = show_parser().parse(argv)
    arguments = given.own
    environment = [
        layer
        for layer in read_deployment(os.environ).layers
        if "db_connection_string" in layer.values
    ]
    name = Layer("command line", {"run_name": arguments.run})
    config = config_of(merged([*layers_given(given.values, given.files, environment), name]))

    async def show() -> None:
        async with run_database(config, run_lives=True) as opened:
            database = opened.database
            if arguments.failed:
                print_poison_tasks(Console(), await poison_tasks(database))
                return
            n_failed = await count_poison_tasks(database)
            failed = f"{n_failed} tasks have failures: `agentrl show {arguments.run} --failed`"
            try:
                record = await find_record(database, arguments.record, Split(arguments.split))
            except ConfigError as error:
                raise ConfigError(f"{error}; {failed}" if n_failed else f"{error}") from None
            turns = await read_turns(database, record)
        print_record(Console(), record, turns)
        if n_failed:
            Console().print(Text(failed, "yellow"))

    asyncio.run(show())
    return 0


async def find_record(database: RunDatabase, record_id: str | None, split: Split) -> Record:
    """The Record of that id, else the split's newest with a score. Raises `ConfigError`."""
    if record_id is not None:
        document = await database.records.find_one({"_id": record_id})
        if document is None:
            raise ConfigError(f"run {database.name} has no record {record_id!r}")
    else:
        document = await database.records.find_one(
            {"split": split, "score": {"$ne": None}}, sort=[("finished_at", -1)]
        )
        if document is None:
            raise ConfigError(f"run {database.name} has no finished record of split {split} yet")
    return Record.from_mongo(document)


async def read_turns(database: RunDatabase, record: Record) -> list[DispatchedSamplingTask]:
    """The Record's turns, in order."""
    cursor = database.turns.find({"record_id": record.id}).sort("turn", 1)
    return [DispatchedSamplingTask.from_mongo(document) async for document in cursor]


def print_record(console: Console, record: Record, turns: Sequence[DispatchedSamplingTask]) -> None:
    """Head, conversation and score."""
    versions = record.versions
    facts = [
        f"task {record.task_id}, attempt {record.traj} of its group, {record.split} epoch"
        f" {record.epoch}" + (f", agent {record.agent_name}" if record.agent_name else ""),
        f"{record.n_turns} turns, {record.n_tool_calls} tool calls ({record.n_tool_errors} errors),"
        f" {record.tokens.generated} tokens generated",
    ]
    if versions is not None:
        facts.append(f"policy versions {versions.min} to {versions.max}")
    console.print(Panel(Text("\n".join(facts)), title=record.id))
    for turn in turns:
        for message in turn.messages:
            if message.get("role") == "tool":
                continue  # shown with the call that it answers
            role = str(message.get("role"))
            console.print(Rule(role, align="left", style="dim"))
            console.print(Text(str(message.get("content") or ""), _ROLE_STYLES.get(role, "")))
        if turn.rewrite is not None:
            told = Rule(f"conversation rewritten: {turn.rewrite}", align="left", style="yellow")
            console.print(told)
        status = "" if turn.status == TurnStatus.COMPLETED else f" · {turn.status}"
        console.print(Rule(f"assistant · turn {turn.turn}{status}", align="left", style="dim"))
        console.print(Text(turn.output_text, "bold"))
        if turn.format_error:
            console.print(Text(f"not understood: {turn.format_error}", "red"))
        for call in turn.tool_calls:
            if not call.name:
                continue  # it could not be read: what was wrong stands above
            arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
            style = "red" if call.is_error else "green"
            console.print(
                Text.assemble(
                    ("  → ", "dim"), f"{call.name}({arguments})", ("  ⇒  ", "dim"),
                    (str(call.result), style), (f"   {call.latency_s * 1000:.0f} ms", "dim"),
                )
            )  # fmt: skip
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
    if len(record.scores) > 1 or record.explanations:
        for scorer, score in record.scores.items():
            explanation = record.explanations.get(scorer, "")
            console.print(Text.assemble(f"  {scorer} {score}", (f"  {explanation}", "dim")))
    if record.left_out:
        console.print(Text(f"  not trained: {record.left_out}", "dim"))


def print_poison_tasks(console: Console, tasks: Sequence[PoisonTask]) -> None:
    """A line for each task: how many of its attempts failed, and why the last one did."""
    if not tasks:
        console.print("nothing of this run failed")
        return
    table = Table("task", "split", "epoch", "failed", "last record", "last error", box=None)
    for task in tasks:
        failed = [
            f"{task.failed} of {task.attempts} given up" if task.failed else "",
            f"{task.again} of {task.attempts} tried again" if task.again else "",
            "group not scored" if task.unscored else "",
        ]
        table.add_row(
            task.task_id, task.split, str(task.epoch), ", ".join(filter(None, failed)),
            task.record, Text(task.error, "red"),
        )  # fmt: skip
    console.print(table)
