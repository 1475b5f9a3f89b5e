"""Checks at the start of a run that folder and database are of one run, and its data is unchanged.

    enter     compares flags, folder and database; raises `ConfigError`, or returns a `RunEntry`
    settle    stores the entry in database and folder, for later starts

The launcher calls both before it starts the parts, and the trainer after it has taken the run. Data
(`DataSet`) is compared by content, so files may move. `startup` chooses the checkpoint to resume
from; `coordinator` switches to new data.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from agentrl.configs import Config, ConfigError
from agentrl.configs.digests import model_digest
from agentrl.configs.flag import is_object
from agentrl.configs.flags import FLAGS
from agentrl.configs.run_flags import Flags, changed_flags, read_digests, stored_flags
from agentrl.configs.run_json import read_run_json
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DataSet, Run
from agentrl.databases.runs import describe, load_run
from agentrl.databases.task_file import known_digest
from agentrl.training.checkpoint.layout import list_checkpoints
from agentrl.whole_file import write_whole

_FILE = "run.json"
TASKS = "tasks"  # folder of the digests, checks and indexes of task files, `databases/task_file`
_WORLD = [flag.name for flag in FLAGS.values() if (flag.group, flag.belongs) == ("agent", "data")]
_TOOLS = {"demo": "the demo's tools", "given": "tools given with MCP_URL or --mcp_manager_url"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class RunEntry:
    """An accepted start of a run.

    `begins`: whether it is the first with this data, or begins again from the start weights.
    `changes`: the flags that differ from the last start, for display.
    """

    identity: str
    data: DataSet
    begins: bool
    flags: Flags
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Mark:
    """The content of `run.json` in the run's folder: the run's identity and its present data."""

    identity: str
    data: DataSet


async def enter(
    database: RunDatabase, config: Config, *, demo_tools: bool | None = None
) -> RunEntry:
    """Compare this start with the run of its name. Raises `ConfigError`.

    `demo_tools`: whether it uses the demo's tools; None if unknown.
    """
    run, mark = await load_run(database), read_mark(config.output)
    worked = await _has_work(database)
    identity = _identity(config, run, mark, worked=worked)
    before = run.data[-1] if run and run.data else mark.data if mark else None
    data = data_of(config, before, demo_tools=demo_tools)
    if before is not None:
        refuse_other_data(config, before, data)
    known = run is not None and bool(run.data)
    anew = known and _begins_anew(config)
    flags = stored_flags(config)
    return RunEntry(
        identity,
        data,
        begins=not known or anew or bool(list(_differences(before, data))),
        flags=flags,
        changes=tuple(changed_flags(run.flags, flags)) if run and run.flags else (),
    )


async def settle(database: RunDatabase, config: Config, entry: RunEntry) -> None:
    """Store the result of `enter` in the database and in the run's folder. Idempotent."""
    await describe(database, entry.identity, entry.flags, read_digests(config))
    config.output.mkdir(parents=True, exist_ok=True)
    mark = {"identity": entry.identity, "data": entry.data.model_dump()}
    with write_whole(config.output / _FILE) as partial:
        partial.write_text(json.dumps(mark, indent=1), encoding="utf-8")


def read_mark(output: Path) -> Mark | None:
    """Read `run.json` of the run's folder; None if there is none. Raises `ConfigError`."""
    return read_run_json(output / _FILE, Mark)


def data_of(config: Config, before: DataSet | None, *, demo_tools: bool | None) -> DataSet:
    """The `DataSet` of the flags. Files and model that are missing are those of `before`.

    `demo_tools` as in `enter`.
    """
    train = config.data.train_file if config.sampling.enable_sampling else None
    held_out, model = config.data.eval_file, config.model.model_name_or_path
    now = DataSet(
        train_file=train,
        train_digest=known_digest(Path(train), config.output / TASKS) if train else None,
        eval_file=held_out,
        eval_digest=known_digest(Path(held_out), config.output / TASKS) if held_out else None,
        model=model,
        model_digest=model_digest(Path(model)) if model else None,
        seed=config.run.seed,
        tools=_tools(config, before, demo_tools),
        world={name: getattr(config.agent, name) for name in _WORLD},
    )
    if before is None:
        return now
    kept = {
        name: getattr(before, name)
        for kind in ("train", "eval", "model")
        if getattr(now, f"{kind}_digest") is None
        for name in (kind if kind == "model" else f"{kind}_file", f"{kind}_digest")
    }
    return now.model_copy(update=kept)


def refuse_other_data(config: Config, before: DataSet, now: DataSet) -> None:
    """Raise `ConfigError` if the run began with other data, unless `--change_data` is given."""
    found = list(_differences(before, now))
    if found and not config.run.change_data:
        name = config.run.run_name
        raise ConfigError(
            f"run {name!r} began with other data: {', and '.join(found)}; use another run name, or "
            "go on with what is new by --change_data"
        )


def _differences(before: DataSet | None, now: DataSet) -> Iterator[str]:
    """Yield each difference as a part of a sentence. Unknown values are not compared."""
    if before is None:
        return
    for kind, flag in (("train", "train_file"), ("eval", "eval_file"), ("model", "model")):
        digests = [getattr(data, f"{kind}_digest") for data in (before, now)]
        if None not in digests and digests[0] != digests[1]:
            was, given = getattr(before, flag), getattr(now, flag)
            name = "model_name_or_path" if flag == "model" else flag
            if was == given:
                yield f"--{name} {given} is not what it was: its content has changed"
            else:
                yield f"--{name} was {was} and is {given} now, with another content"
    if {before.tools, now.tools} == {"demo", "given"}:
        yield f"it had {_TOOLS[before.tools]} and has {_TOOLS[now.tools]} now"
    for name, value in now.world.items():
        was = before.world.get(name, value)
        if was != value:
            yield f"--{name} was {was or 'not given'} and is {value or 'not given'} now"


def _tools(config: Config, before: DataSet | None, demo_tools: bool | None) -> str:
    """The origin of the tools (`DataSet.tools`), as far as this process knows it."""
    url = config.agent.mcp_manager_url
    if url is None:
        return "demo" if demo_tools else before.tools if before else "none"
    # Perhaps the demo's: an object, or the server that a launch of an earlier version started.
    here = is_object(url) or urlsplit(url).hostname in _LOOPBACK
    if demo_tools is None and here and before is not None and before.tools == "demo":
        return "demo"
    return "given"


def _begins_anew(config: Config) -> bool:
    """Whether the run begins again from its start weights, with new samples."""
    return config.sampling.enable_sampling and _wanted(config) == "false"


def _wanted(config: Config) -> str | None:
    wanted = config.checkpoint.resume_from_checkpoint
    return wanted.lower() if wanted is not None and wanted.lower() in ("true", "false") else wanted


async def _has_work(database: RunDatabase) -> bool:
    """Whether the database has Records or rows."""
    for documents in (database.records, database.rows):
        if await documents.find_one({}, {"_id": 1}) is not None:
            return True
    return False


def _identity(config: Config, run: Run | None, mark: Mark | None, *, worked: bool) -> str:
    """The run's identity, a new one for a new run.

    Raises `ConfigError` if folder and database are of different runs, or if one of them is missing
    and the flags do not allow it. `--enable_sampling false` does, as does a
    `--resume_from_checkpoint` of false or of a path, whose run `startup` checks. `worked`: whether
    the database has Records or rows.
    """
    name, output = config.run.run_name, config.output
    stored = run.identity if run else None
    if stored is None and mark is None and run is not None and run.starts:
        return uuid4().hex  # a run of an older version, which stored no identity
    if mark is not None and mark.identity == stored:
        return mark.identity
    told = _wanted(config) not in (None, "true") or not config.sampling.enable_sampling
    checkpoints = list_checkpoints(output)
    if stored is None:
        if checkpoints and not told:
            raise ConfigError(
                f"{output} holds run {name!r} up to {checkpoints[-1].name}, and its database is "
                f"another one or gone: give the database that it was trained with, go on without "
                f"its trajectories by --resume_from_checkpoint {checkpoints[-1]}, or use another "
                "run name"
            )
        return mark.identity if mark else uuid4().hex
    if mark is not None:
        raise ConfigError(
            f"{output} and the database are of two runs that are both called {name!r}: give the "
            f"database or the --output_dir that belongs to the other, or use another run name"
        )
    if worked and not checkpoints and not told:
        raise ConfigError(
            f"the database holds a run {name!r} already, and {output} is not its folder (or was "
            f"removed): remove that run with `agentrl delete {name}`, use another run name, or go "
            "on with it by --resume_from_checkpoint FOLDER, a checkpoint of it"
        )
    return stored
