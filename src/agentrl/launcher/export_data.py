"""`agentrl export-data`: writes a run's trajectories to a file for Hugging Face datasets."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path

import orjson

from agentrl.configs import ConfigError, model_folder
from agentrl.configs.verbs import export_data_parser
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, Split, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.row_ledger import fetch_rows
from agentrl.databases.runs import load_run
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.data_file import Format, write_data
from agentrl.launcher.data_rows import (
    Fields,
    NotExported,
    Stored,
    message_rows,
    preference_row,
    token_rows,
)
from agentrl.launcher.database import place_config, run_database
from agentrl.launcher.record_filter import Filter, finished_records, read_conditions
from agentrl.launcher.report import print_lines
from agentrl.rollout.chat import ChatRenderer, ToolSchema

_AT_ONCE = 32  # Records whose turns are in memory
_LEASE_S = 60.0  # unused: what is over is read without a lease
_SHOWN = 5
_MODEL = "model_name_or_path"


def main(argv: Sequence[str]) -> int:
    """Write the file; returns the exit status. Raises `ConfigError` for bad input."""
    given = export_data_parser().parse(argv)
    own, config = given.own, place_config(given)
    conditions = read_conditions(own.where)
    out = Path(own.out or f"{own.run}-{own.format}.{own.to}")
    if own.out and out.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"--out {out}: its name must end in .parquet or .jsonl")
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; give another name, or remove it")
    console, left_out = TerminalConsole(), Counter[str]()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            opened = runner.run(stack.enter_async_context(run_database(config, run_lives=True)))
            export = _Export(opened.database, conditions, Split(own.split), own.model, left_out)
            n_rows = write_data(out, own.format, _drawn(runner, export.rows(own.format)))
        finally:
            runner.run(stack.aclose())
    if not n_rows:
        out.unlink()
    lines = [f"wrote {out}: {n_rows:,} rows"] if n_rows else ["nothing to export"]
    lines += [f"left out {n:,}, because each {why}" for why, n in left_out.most_common(_SHOWN)]
    print_lines(console, lines)
    return 0 if n_rows else 1


def _drawn(runner: asyncio.Runner, rows: AsyncIterator[Fields]) -> Iterator[Fields]:
    """The rows one by one, for a writer that is not async."""
    while True:
        try:
            yield runner.run(anext(rows))  # type: ignore[arg-type]
        except StopAsyncIteration:
            return


class _Export:
    """Reads a run's Records for a file. `left_out`: counts those without a row, by the reason."""

    def __init__(
        self,
        database: RunDatabase,
        conditions: Filter,
        split: Split,
        model: str | None,
        left_out: Counter[str],
    ) -> None:
        self._database = database
        self._conditions = conditions
        self._split = split
        self._model = model
        self._left_out = left_out
        self._ledger = RecordLedger(database, _LEASE_S)
        self._renderer: ChatRenderer | None = None
        self._tools: dict[str, Sequence[ToolSchema]] = {}
        self._temperature = 1.0

    async def rows(self, format: Format) -> AsyncIterator[Fields]:
        """The rows, in the order of tasks and Records."""
        await self._read_flags()
        if format == "preferences":
            async for group in self._groups():
                for row in self._made(partial(self._preference_rows, group)):
                    yield row
            return
        async for stored in self._stored():
            tokens = format == "tokens"
            make = partial(token_rows if tokens else self._message_rows, stored)
            for row in self._made(make):
                yield row

    def _message_rows(self, stored: Stored) -> list[Fields]:
        return message_rows(stored, self._renderer_of(stored))

    def _preference_rows(self, group: Sequence[Stored]) -> list[Fields]:
        for stored in group:
            self._renderer_of(stored)
        return [preference_row(group, self._renderer)]

    def _made(self, make: Callable[[], list[Fields]]) -> list[Fields]:
        try:
            return make()
        except NotExported as reason:
            self._left_out[str(reason)] += 1
            return []

    async def _read_flags(self) -> None:
        run = await load_run(self._database)
        flags = (run.flags or {}) if run else {}
        known = {name: value for name, value in flags.items() if value is not None}
        self._model = self._model or known.get(_MODEL)
        params = orjson.loads(known.get("preferred_sampling_params", "{}"))
        self._temperature = float(params.get("temperature", 1.0))
        self._options = orjson.loads(known.get("chat_template_kwargs", "{}"))
        self._parser = known.get("tool_call_parser")

    def _renderer_of(self, stored: Stored) -> ChatRenderer | None:
        """The renderer, loaded when the first Record needs it. Raises `ConfigError`."""
        if self._renderer is not None or not stored.has_tokens:
            return self._renderer
        if self._model is None:
            raise ConfigError(
                "--model is needed: the folder of the model that sampled the tokens, whose chat "
                "template reads its turns"
            )
        folder = model_folder(self._model, "--model")
        try:
            self._renderer = ChatRenderer.load(folder, self._options, self._parser)
        except ValueError as error:
            raise ConfigError(f"--model: {error}") from None
        return self._renderer

    async def _ids(self) -> list[str]:
        records = await finished_records(self._database, self._conditions, self._split)
        return [record["_id"] for record in sorted(records, key=itemgetter("task", "_id"))]

    async def _stored(self) -> AsyncIterator[Stored]:
        ids = await self._ids()
        for start in range(0, len(ids), _AT_ONCE):
            for stored in await self._read(ids[start : start + _AT_ONCE]):
                yield stored

    async def _groups(self) -> AsyncIterator[list[Stored]]:
        """The Records of one task after the other."""
        group: list[Stored] = []
        async for stored in self._stored():
            if group and group[0].record.task != stored.record.task:
                yield group
                group = []
            group.append(stored)
        if group:
            yield group

    async def _read(self, ids: Sequence[str]) -> list[Stored]:
        found = self._database.records.find({"_id": {"$in": list(ids)}})
        records = {d["_id"]: Record.from_mongo(d) async for d in found}
        tasks_of = sorted({record.task for record in records.values()})
        found = self._database.tasks.find({"_id": {"$in": tasks_of}})
        tasks = {d["_id"]: Task.from_mongo(d) async for d in found}
        turns = await self._ledger.turns(ids)
        rows = {row.id: row for row in (await fetch_rows(self._database, list(ids))).rows}
        made = []
        for each in ids:
            record = records[each]
            tools = await self._tools_of(record.tool_list)
            row = rows.get(each)
            temperature = self._temperature if row is None else row.temperature
            made.append(Stored(record, tasks[record.task], turns[each], tools, row, temperature))
        return made

    async def _tools_of(self, tool_list: str | None) -> Sequence[ToolSchema]:
        if tool_list is None:
            return ()
        if tool_list not in self._tools:
            document = await self._database.tool_lists.find_one({"_id": tool_list})
            self._tools[tool_list] = orjson.loads(document["schemas"]) if document else ()
        return self._tools[tool_list]
