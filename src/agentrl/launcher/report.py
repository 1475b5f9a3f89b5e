"""The report of a finished run: `summary.json` and the commands for the next steps."""

import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from agentrl.configs import Config
from agentrl.databases.connection import BEFORE_ALL, RunDatabase
from agentrl.databases.documents import DataSet, RecordStatus, RowStatus, SlotStatus, Split
from agentrl.databases.quarantine import count_quarantined
from agentrl.databases.row_ledger import count_rows
from agentrl.databases.runs import load_run
from agentrl.databases.success import SUCCESS_SCORE, CurvePoint, HeldOut, evaluations, success_curve
from agentrl.launcher.deployment import REPOSITORY
from agentrl.launcher.presets import DEMO
from agentrl.launcher.progress import Metrics, read_metrics
from agentrl.whole_file import write_whole

_EDGE_STEPS = 3  # steps that the first and the last reward are averaged over


@dataclass(frozen=True)
class Slots:
    """Rollouts that ended, of training and evaluation."""

    total: int  # the sum of the others
    completed: int  # sampled, and scored
    failed: int  # given up after --max_failures errors
    quarantined: int  # sampled, and not scored after --max_scoring_failures errors


@dataclass(frozen=True)
class Rows:
    """Number of training rows by state."""

    trained: int
    waiting: int
    evicted: int  # exceeded --max_staleness before they were trained


@dataclass(frozen=True)
class InQuarantine:
    """Number of groups, records and rows in quarantine; `agentrl release` puts them back."""

    groups: int
    records: int
    rows: int


@dataclass(frozen=True)
class Tokens:
    """Generated tokens of training. `replayed`: used again by attempts that followed others."""

    sampled: int
    trained: int
    replayed: int = 0


@dataclass(frozen=True)
class Conversations:
    """Conversations of training.

    A continuation is a turn that was followed by another one. At a drift the chat template rewrites
    sampled tokens, and a new segment begins.
    """

    records: int
    segments: int
    continuations: int
    drifts: int


@dataclass(frozen=True)
class Sampled:
    """Totals over the records of training."""

    tokens: int  # generated
    conversations: Conversations
    replayed: int = 0  # tokens of earlier attempts, used again


@dataclass(frozen=True)
class Summary:
    """The content of `summary.json`. Rates are None if nothing was evaluated or sampled."""

    steps: int
    seconds: float  # wall time of all launches of the run, set-up not included
    eval_file: str | None  # the present file of held-out tasks
    eval_before: float | None  # success rate on the held-out tasks, first evaluation
    eval_after: float | None  # and last
    reward_first: float | None  # mean score of the records of the first three steps' policies
    reward_last: float | None  # and of the last three steps'
    slots: Slots
    rows: Rows
    quarantined: InQuarantine
    max_staleness: int
    tokens: Tokens
    conversations: Conversations


@dataclass(frozen=True)
class Report:
    """A finished run in numbers."""

    summary: Summary
    curve: Sequence[CurvePoint]
    held_out: Sequence[HeldOut]


async def gather_report(database: RunDatabase, output: Path, seconds: float) -> Report:
    """Read a run's report from its database and metrics."""
    metrics = read_metrics(output / "metrics.jsonl")
    run = await load_run(database)
    data = run.data[-1] if run and run.data else DataSet()
    curve = await success_curve(database)
    held_out = await evaluations(database)
    rows = await count_rows(database)
    slots = await _slots(database)
    summary = summarise(
        metrics,
        curve,
        held_out,
        seconds=seconds,
        slots=slots,
        rows=Rows(
            trained=rows[RowStatus.TRAINED],
            waiting=rows[RowStatus.READY] + rows[RowStatus.LEASED],
            evicted=rows[RowStatus.EVICTED],
        ),
        quarantined=InQuarantine(**asdict(await count_quarantined(database))),
        sampled=await _sampled(database),
        eval_file=data.eval_file,
    )
    return Report(summary, curve, held_out)


def summarise(
    metrics: Sequence[Metrics],
    curve: Sequence[CurvePoint],
    held_out: Sequence[HeldOut],
    *,
    seconds: float,
    slots: Slots,
    rows: Rows,
    quarantined: InQuarantine,
    sampled: Sampled,
    eval_file: str | None = None,
) -> Summary:
    """Compute the summary."""
    return Summary(
        steps=max((line["step"] for line in metrics), default=0),
        seconds=round(seconds, 1),
        eval_file=eval_file,
        eval_before=round(held_out[0].success, 4) if held_out else None,
        eval_after=round(held_out[-1].success, 4) if held_out else None,
        reward_first=_pooled_reward(curve[:_EDGE_STEPS]),
        reward_last=_pooled_reward(curve[-_EDGE_STEPS:]),
        slots=slots,
        rows=rows,
        quarantined=quarantined,
        max_staleness=max((line["staleness_max"] for line in metrics), default=0),
        tokens=Tokens(
            sampled=sampled.tokens,
            trained=sum(line["n_train_tokens"] for line in metrics),
            replayed=sampled.replayed,
        ),
        conversations=sampled.conversations,
    )


def _pooled_reward(points: Sequence[CurvePoint]) -> float | None:
    """Mean score over all records of these points."""
    records = sum(point.records for point in points)
    if not records:
        return None
    return round(sum(point.reward * point.records for point in points) / records, 4)


async def _slots(database: RunDatabase) -> Slots:
    """By indexes. A rollout that was given up has an error; of any other that ended there is one
    Record that has not failed."""
    finished = attempts_failed = 0
    for split in Split:
        of_split = {"split": split, "finished_at": {"$gt": BEFORE_ALL}}
        finished += await database.records.count_documents(of_split, hint="recent")
        attempts_failed += await database.records.count_documents(
            {**of_split, "status": RecordStatus.FAILED}, hint="failed"
        )
    given_up = {"slots.error": {"$type": "string"}}
    cursor = await database.tasks.aggregate(
        [
            {"$match": given_up},
            {"$unwind": "$slots"},
            {"$match": {"slots.status": {"$in": [SlotStatus.FAILED, SlotStatus.QUARANTINED]}}},
            {"$group": {"_id": "$slots.status", "n": {"$sum": 1}}},
        ],
        hint="failed",
    )
    counts = {group["_id"]: group["n"] async for group in cursor}
    failed, quarantined = (counts.get(s, 0) for s in (SlotStatus.FAILED, SlotStatus.QUARANTINED))
    sampled = finished - attempts_failed
    return Slots(
        total=sampled + failed,
        completed=sampled - quarantined,
        failed=failed,
        quarantined=quarantined,
    )


async def _sampled(database: RunDatabase) -> Sampled:
    sums = {name: {"$sum": f"$n_{name}"} for name in ("segments", "continuations", "drifts")}
    cursor = await database.records.aggregate(
        [
            {"$match": {"split": Split.TRAIN}},
            {
                "$group": {
                    "_id": None,
                    "tokens": {"$sum": "$tokens.generated"},
                    "records": {"$sum": 1},
                    **sums,
                }
            },
        ],
        hint="results",
    )
    async for group in cursor:
        names = ("records", "segments", "continuations", "drifts")
        conversations = Conversations(**{name: int(group[name]) for name in names})
        replayed = await _replayed(database)
        return Sampled(int(group["tokens"]) - replayed, conversations, replayed)
    return Sampled(0, Conversations(0, 0, 0, 0))


async def _replayed(database: RunDatabase) -> int:
    """Generated tokens of training that were not sampled again."""
    cursor = await database.records.aggregate(
        [
            {"$match": {"split": Split.TRAIN, "replay.tokens": {"$gt": 0}}},
            {"$group": {"_id": None, "tokens": {"$sum": "$replay.tokens"}}},
        ],
        hint="replayed",
    )
    return sum([int(group["tokens"]) async for group in cursor])


def write_summary(output: Path, summary: Summary) -> Path:
    """Write `summary.json` atomically."""
    path = output / "summary.json"
    with write_whole(path) as partial:
        partial.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    return path


def next_steps(config: Config, script: str) -> list[str]:
    """The next commands, one per line: show a trajectory, evaluate, and train on own tasks.

    They can be typed in the user's current folder and shell.
    """
    run = run_arguments(config)
    own = from_here(REPOSITORY / script)
    held_out = "" if config.data.eval_file else "EVAL_FILE=JSONL "
    steps = [
        f"look at a trajectory:     {agentrl_command()} show {run}",
        f"look in a browser:        {agentrl_command()} view {run}",
        f"evaluate the checkpoint:  {held_out}{from_here(REPOSITORY / 'eval_example.sh')} {run}",
    ]
    model = config.model.model_name_or_path
    if model is None or Path(model).absolute() == DEMO / "model":
        steps.append(f"train on your own tasks:  MODEL=DIR TRAIN_FILE=JSONL MCP_URL=URL {own} NAME")
    return steps


async def sampled_lines(database: RunDatabase, config: Config, seconds: float) -> list[str]:
    """What a run without a trainer holds at its end, and what can be made of it."""
    slots, rows = await _slots(database), await count_rows(database)
    success = {"$cond": [{"$gte": ["$score", SUCCESS_SCORE]}, 1, 0]}
    cursor = await database.records.aggregate(
        [
            {"$match": {"split": Split.TRAIN, "score": {"$gte": -math.inf}}},
            {
                "$group": {
                    "_id": None,
                    "n": {"$sum": 1},
                    "right": {"$sum": success},
                    "best": {"$max": "$score"},
                }
            },
        ]
    )
    [scored] = await cursor.to_list() or [{"n": 0, "right": 0, "best": 0}]
    rate = f"success {scored['right'] / scored['n']:.3f}" if scored["n"] else "no score"
    run, verb = run_arguments(config), agentrl_command()
    failed = f", {slots.failed} given up after errors" if slots.failed else ""
    right = [
        f"train on the right ones:   {verb} sft --model {config.model.model_name_or_path} "
        f"--from_run {config.run.run_name}"
    ]
    return [
        "",
        f"{config.run.run_name}: {slots.completed} trajectories in {seconds:.0f} s{failed}; "
        f"{rate}; {rows[RowStatus.READY]} rows are ready for a trainer",
        "",
        f"look at them:              {verb} show {run} --list",
        f"write them to a file:      {verb} export-data {run} --format messages --to parquet",
        *(right if scored["best"] >= 1 else []),  # the condition of `sft --from_run`
    ]


def run_arguments(config: Config) -> str:
    """The arguments that name the run on the command line of a verb."""
    if config.run.output_dir is None:
        return config.run.run_name
    return f"{config.run.run_name} --output_dir {config.run.output_dir}"


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Print lines that can be copied, without wrapping and colours."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def agentrl_command() -> str:
    """The command that calls `agentrl` in the user's current folder and shell.

    The scripts change their PATH and pass the caller's as AGENTRL_CALLER_PATH.
    """
    command = Path(sys.prefix) / "bin" / "agentrl"
    callers = os.environ.get("AGENTRL_CALLER_PATH", os.environ.get("PATH"))
    found = shutil.which("agentrl", path=callers)
    # Without a command beside its Python, the one on PATH is installed for all environments.
    usual = found is not None and (not command.exists() or os.path.samefile(found, command))
    return "agentrl" if usual else from_here(command)


def from_here(command: Path) -> str:
    """A path as a command in the current folder."""
    here = Path.cwd()
    if not command.is_relative_to(here):
        return shlex.quote(str(command))
    below = command.relative_to(here)
    return shlex.quote(str(below) if len(below.parts) > 1 else f"./{below}")
