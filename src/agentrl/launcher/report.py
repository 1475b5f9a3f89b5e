"""What a finished run leaves for people: `summary.json`, two pictures and what to do next."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from agentrl.configs import Config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DataSet, RowStatus, SlotStatus, Split, TaskStatus
from agentrl.databases.runs import load_run
from agentrl.databases.transitions import TERMINAL_SLOTS
from agentrl.launcher.progress import HeldOut, Metrics, evaluations, read_metrics
from agentrl.launcher.run_folder import write_whole
from agentrl.rollout.rewarding import SUCCESS_SCORE

_EDGE_STEPS = 3  # steps whose records are the first and the last reward


@dataclass(frozen=True)
class CurvePoint:
    """The training records that the policy of one step began."""

    step: int
    records: int
    success: float
    reward: float  # mean score


@dataclass(frozen=True)
class Slots:
    """Attempts that ended, of training and evaluation."""

    total: int
    failed: int  # given up after --max_attempts errors


@dataclass(frozen=True)
class Rows:
    """Training rows by what became of them."""

    trained: int
    waiting: int
    evicted: int  # too old when their turn came


@dataclass(frozen=True)
class Tokens:
    """Generated tokens of training."""

    sampled: int
    trained: int


@dataclass(frozen=True)
class Conversations:
    """What training sampled: a junction is where a turn was followed by more; at a drift, the chat
    template rewrites what was sampled, and a new segment begins."""

    records: int
    segments: int
    junctions: int
    drifts: int


@dataclass(frozen=True)
class Sampled:
    """What the records of training hold together."""

    tokens: int  # generated
    conversations: Conversations


@dataclass(frozen=True)
class Summary:
    """`summary.json`. Rates are None where nothing was evaluated or sampled."""

    steps: int
    seconds: float  # wall time of all launches of the run, set-up not included
    eval_file: str | None  # the held-out tasks, which may have been others before
    eval_before: float | None  # success rate on the held-out tasks, first evaluation
    eval_after: float | None  # and last
    reward_first: float | None  # mean score of what the first steps' policies sampled
    reward_last: float | None
    slots: Slots
    rows: Rows
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
    curve = await _curve(database, data.epoch)
    held_out = await evaluations(database)
    rows = await _count_by(database, "record_data", "$status")
    slots = await _slots(database)
    summary = summarise(
        metrics,
        curve,
        held_out,
        seconds=seconds,
        slots=slots,
        rows=Rows(
            trained=rows.get(RowStatus.TRAINED, 0),
            waiting=rows.get(RowStatus.READY, 0) + rows.get(RowStatus.LEASED, 0),
            evicted=rows.get(RowStatus.EVICTED, 0),
        ),
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
    sampled: Sampled,
    eval_file: str | None = None,
) -> Summary:
    """The summary of what was read."""
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
        max_staleness=max((line["staleness_max"] for line in metrics), default=0),
        tokens=Tokens(
            sampled=sampled.tokens, trained=sum(line["n_train_tokens"] for line in metrics)
        ),
        conversations=sampled.conversations,
    )


def _pooled_reward(points: Sequence[CurvePoint]) -> float | None:
    """Mean score over all records of these points."""
    records = sum(point.records for point in points)
    if not records:
        return None
    return round(sum(point.reward * point.records for point in points) / records, 4)


async def _curve(database: RunDatabase, first_epoch: int) -> list[CurvePoint]:
    """Success and reward by the step whose policy began the records, from an epoch on: those
    before are of other data.

    From the records and not from the trained rows: rows are filtered (all right and all wrong
    groups teach nothing), so their mean reward says little about the policy.
    """
    step_of = {
        document["version"]: document["step"]
        async for document in database.policy_versions.find({}, {"version": 1, "step": 1})
    }
    success = {"$cond": [{"$gte": ["$score", SUCCESS_SCORE]}, 1, 0]}
    cursor = await database.records.aggregate(
        [
            {
                "$match": {
                    "split": Split.TRAIN,
                    "epoch": {"$gte": first_epoch},
                    "score": {"$ne": None},
                    "versions": {"$ne": None},
                }
            },
            {
                "$group": {
                    "_id": "$versions.min",
                    "records": {"$sum": 1},
                    "successes": {"$sum": success},
                    "score": {"$sum": "$score"},
                }
            },
        ]
    )
    # A resumed run publishes the weights of one step under several versions.
    pooled: dict[int, tuple[int, int, float]] = {}
    async for group in cursor:
        step = step_of.get(group["_id"])
        if step is None:
            continue
        records, successes, score = pooled.get(step, (0, 0, 0.0))
        pooled[step] = (
            records + group["records"], successes + group["successes"], score + group["score"],
        )  # fmt: skip
    return [
        CurvePoint(step, records, successes / records, score / records)
        for step, (records, successes, score) in sorted(pooled.items())
    ]


async def _slots(database: RunDatabase) -> Slots:
    cursor = await database.tasks.aggregate(
        [
            {"$match": {"status": {"$ne": TaskStatus.CREATED}}},
            {"$unwind": "$slots"},
            {"$group": {"_id": "$slots.status", "n": {"$sum": 1}}},
        ]
    )
    counts = {group["_id"]: group["n"] async for group in cursor}
    return Slots(
        total=sum(counts.get(status, 0) for status in TERMINAL_SLOTS),
        failed=counts.get(SlotStatus.FAILED, 0),
    )


async def _sampled(database: RunDatabase) -> Sampled:
    sums = {name: {"$sum": f"$n_{name}"} for name in ("segments", "junctions", "drifts")}
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
        ]
    )
    async for group in cursor:
        names = ("records", "segments", "junctions", "drifts")
        conversations = Conversations(**{name: int(group[name]) for name in names})
        return Sampled(int(group["tokens"]), conversations)
    return Sampled(0, Conversations(0, 0, 0, 0))


async def _count_by(database: RunDatabase, collection: str, key: str) -> Mapping[str, int]:
    cursor = await database.database[collection].aggregate(
        [{"$group": {"_id": key, "n": {"$sum": 1}}}]
    )
    return {group["_id"]: group["n"] async for group in cursor}


def write_summary(output: Path, summary: Summary) -> Path:
    """Write `summary.json`, whole or not at all."""
    path = output / "summary.json"
    with write_whole(path) as partial:
        partial.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    return path


def next_steps(config: Config, script: str) -> list[str]:
    """Three lines: look at a trajectory, evaluate the checkpoint, train on tasks of one's own."""
    run = run_arguments(config)
    return [
        f"look at a trajectory:     {agentrl_command()} show {run}",
        f"evaluate the checkpoint:  ./eval_example.sh {run}",
        f"train on your own tasks:  MODEL=DIR TRAIN_FILE=JSONL MCP_URL=URL ./{script} NAME",
    ]


def run_arguments(config: Config) -> str:
    """How a verb is told which run is meant."""
    if config.run.output_dir is None:
        return config.run.run_name
    return f"{config.run.run_name} --output_dir {config.run.output_dir}"


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Lines that may be copied: not wrapped, not coloured."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def agentrl_command() -> str:
    """How the user calls `agentrl` from the current folder and shell."""
    environment = Path(sys.prefix)
    active = (os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX"))
    if str(environment) in active:
        return "agentrl"
    command = environment / "bin" / "agentrl"
    return (
        str(command.relative_to(Path.cwd())) if command.is_relative_to(Path.cwd()) else str(command)
    )
