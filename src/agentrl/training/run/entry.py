"""Whose run a start is: are its folder and its database of one run, and is anything other than it
was when the run began?

    enter     what is found, or one sentence that refuses it; nothing is written
    settle    what the start is goes into folder and database, for those who come after

The launcher does both before it starts anything, the trainer as soon as it holds the run. What a
run is made of (`DataSet`) is told by content, so that a file may move. Not in here: which
checkpoint is gone on from (`startup`), and what the trainer does with other data (`coordinator`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from agentrl.configs import Config, ConfigError
from agentrl.configs.digests import model_digest
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
TASKS = "tasks"  # the folder with what is known of task files, see `databases/task_file`
_WORLD = [flag.name for flag in FLAGS.values() if (flag.group, flag.belongs) == ("agent", "data")]
_TOOLS = {"demo": "the demo's tools", "given": "tools given with MCP_URL or --mcp_manager_url"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class RunEntry:
    """A start of a run that may go ahead. `begins`: with data that the run did not have before, or
    anew. `changes`: flags that are others than at the last start, for people."""

    identity: str
    data: DataSet
    begins: bool
    flags: Flags
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Mark:
    """What a run's folder says of the run: see `Run.identity`."""

    identity: str
    data: DataSet


async def enter(
    database: RunDatabase, config: Config, *, demo_tools: bool | None = None
) -> RunEntry:
    """What this start is to the run of its name. Raises `ConfigError`.

    `demo_tools`: whether the demo's tool server is started for it; None if that is not known here.
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
    """Keep what `enter` found, in the database and in the run's folder. Again changes nothing."""
    await describe(database, entry.identity, entry.flags, read_digests(config))
    config.output.mkdir(parents=True, exist_ok=True)
    mark = {"identity": entry.identity, "data": entry.data.model_dump()}
    with write_whole(config.output / _FILE) as partial:
        partial.write_text(json.dumps(mark, indent=1), encoding="utf-8")


def read_mark(output: Path) -> Mark | None:
    """What the run's folder says, if it is a run's. Raises `ConfigError`."""
    return read_run_json(output / _FILE, Mark)


def data_of(config: Config, before: DataSet | None, *, demo_tools: bool | None) -> DataSet:
    """What the run learns from by its flags; what they do not say is as `before`."""
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
    """Raises `ConfigError` if the run began with other data, unless `--change_data` takes it."""
    found = list(_differences(before, now))
    if found and not config.run.change_data:
        name = config.run.run_name
        raise ConfigError(
            f"run {name!r} began with other data: {', and '.join(found)}; use another run name, or "
            "go on with what is new by --change_data"
        )


def _differences(before: DataSet | None, now: DataSet) -> Iterator[str]:
    """What is other, each as words of a sentence. What one of them does not know is not."""
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
    """Where tools are from, as far as it is known here."""
    url = config.agent.mcp_manager_url
    if url is None:
        return "demo" if demo_tools else before.tools if before else "none"
    started_here = urlsplit(url).hostname in _LOOPBACK  # by a launch, which knew what it is
    if demo_tools is None and started_here and before is not None and before.tools == "demo":
        return "demo"
    return "given"


def _begins_anew(config: Config) -> bool:
    """Whether the run begins again from its start weights, with samples of its own."""
    return config.sampling.enable_sampling and _wanted(config) == "false"


def _wanted(config: Config) -> str | None:
    wanted = config.checkpoint.resume_from_checkpoint
    return wanted.lower() if wanted is not None and wanted.lower() in ("true", "false") else wanted


async def _has_work(database: RunDatabase) -> bool:
    """Whether the database holds anything that was sampled or is to be trained."""
    for documents in (database.records, database.rows):
        if await documents.find_one({}, {"_id": 1}) is not None:
            return True
    return False


def _identity(config: Config, run: Run | None, mark: Mark | None, *, worked: bool) -> str:
    """The run's. Raises `ConfigError` if folder and database are not of one run.

    Rows that the database holds are trained by whoever asks for just that (`--enable_sampling
    false`), and what a checkpoint that is named by its path belongs to, `startup` looks at.
    """
    name, output = config.run.run_name, config.output
    stored = run.identity if run else None
    if stored is None and mark is None and run is not None and run.starts:
        return uuid4().hex  # a run of an older version, which knew no identity
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
