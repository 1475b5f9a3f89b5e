"""What a run says of itself, while it runs and at the end, read from a real database."""

import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from agentrl.configs import ConfigError, parse_config
from agentrl.databases.attempt_tally import AttemptCounts
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    Slot,
    SlotStatus,
    Split,
    StopReason,
    Task,
    TaskStatus,
    TokenCounts,
    ToolCall,
    VersionRange,
    group_order,
)
from agentrl.databases.failed_tasks import FailedTask, failed_tasks
from agentrl.databases.feeder import make_tasks
from agentrl.databases.policies import publish
from agentrl.databases.quarantine import QuarantinedItem
from agentrl.databases.services import register_urls
from agentrl.databases.success import Evaluating, success_curve
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.launcher.curve import draw_curve
from agentrl.launcher.deployment import REPOSITORY
from agentrl.launcher.evaluation import (
    HeldOutFile,
    TaskRollouts,
    read_rollouts,
    summarise_rollouts,
    write_report,
)
from agentrl.launcher.progress import MetricsTail, ProgressReader, Snapshot
from agentrl.launcher.report import (
    agentrl_command,
    gather_report,
    next_steps,
    sampled_lines,
    write_summary,
)
from agentrl.launcher.show_failed import print_failed_tasks, print_quarantined
from agentrl.launcher.show_record import print_record
from agentrl.launcher.training_curves import draw_training
from agentrl.launcher.trajectory import find_record, read_turns, right_answer


def metrics_line(step: int, **changes: float) -> str:
    line = {
        "step": step, "n_train_tokens": 100, "step_seconds": 2.0, "staleness_mean": 0.5,
        "staleness_max": step % 3, **changes,
    }  # fmt: skip
    return json.dumps(line) + "\n"


async def add_group(
    database: RunDatabase,
    scores: Sequence[float | None],
    *,
    name: str,
    split: Split = Split.TRAIN,
    epoch: int = 0,
    version: int = 0,
    status: TaskStatus = TaskStatus.COMPLETED,
) -> None:
    """A finished group; a score of None is an attempt that was given up."""
    slots = [
        Slot(
            rollout=rollout,
            status=SlotStatus.FAILED if score is None else SlotStatus.COMPLETED,
            record=f"{name}-t{rollout}-a0",
            score=score,
            error="ValueError: no" if score is None else None,
        )
        for rollout, score in enumerate(scores)
    ]
    seq = await database.tasks.count_documents({"split": split, "epoch": epoch})
    order = group_order(epoch, seq)
    task = Task(
        id=name, split=split, epoch=epoch, seq=seq, group_order=order, status=status, task_id=name,
        query="?", pending=0, slots=slots,
        completed_at=datetime.now(UTC) if status == TaskStatus.COMPLETED else None,
    )  # fmt: skip
    await database.tasks.insert_one(task.to_mongo())
    for rollout, score in enumerate(scores):
        record = Record(
            id=f"{name}-t{rollout}-a0", task=name, task_id=name, rollout=rollout, attempt=0,
            split=split,
            epoch=epoch, owner="s",
            status=RecordStatus.FAILED if score is None else RecordStatus.READY,
            query="?", n_turns=2 + rollout % 2,
            n_tool_calls=1, n_segments=2, n_continuations=3, n_drifts=1,
            tokens=TokenCounts(generated=30), score=score,
            versions=VersionRange(min=version, max=version), stop_reason=StopReason.ANSWERED,
            finished_at=datetime.now(UTC) - timedelta(seconds=rollout),
        )  # fmt: skip
        await database.records.insert_one(record.to_mongo())


async def add_run(database: RunDatabase, output: Path) -> None:
    """Two steps: the first policy succeeds in 1 of 4, the last in 3 of 4; two evaluations."""
    await publish(database, 0, 0, "v0")
    await publish(database, 1, 1, "v1")
    await publish(database, 2, 1, "v2")  # step 1 again, after a resume
    await add_group(database, [1, 0, 0, 0], name="a", version=0)
    await add_group(database, [1, 1, 0], name="b", version=1)
    await add_group(database, [1, None], name="c", version=2)
    for epoch, scores in ((0, [0.0, 1.0]), (1, [1.0, 1.0])):
        await add_group(database, scores, name=f"e{epoch}", split=Split.EVAL, epoch=epoch)
    await add_group(
        database, [0.0], name="open", split=Split.EVAL, epoch=2, status=TaskStatus.RUNNING
    )
    await add_group(database, [0.0], name="later", split=Split.EVAL, epoch=-1)
    for number, status in enumerate(("trained", "trained", "ready", "leased", "evicted")):
        await database.rows.insert_one(
            {"_id": str(number), "status": status, "group_order": number}
        )
    unscored = {
        "slots.0.status": SlotStatus.QUARANTINED,
        "slots.0.score": None,
        "slots.0.error": "no score",
    }
    await database.tasks.update_one({"_id": "later"}, {"$set": unscored})
    (output / "metrics.jsonl").write_text(metrics_line(1) + metrics_line(2))


async def test_the_summary_counts_what_the_database_and_the_metrics_hold(
    database: RunDatabase, tmp_path: Path
) -> None:
    await add_run(database, tmp_path)
    report = await gather_report(database, tmp_path, seconds=12.34)
    assert asdict(report.summary) == {
        "steps": 2,
        "seconds": 12.3,
        "eval_file": None,
        "eval_before": 0.5,
        "eval_after": 1.0,
        "reward_first": 0.5,
        "reward_last": 0.5,
        "slots": {"total": 15, "completed": 13, "failed": 1, "quarantined": 1},
        "rows": {"trained": 2, "waiting": 2, "evicted": 1},
        "quarantined": {"groups": 0, "records": 0, "rows": 0},
        "max_staleness": 2,
        "tokens": {"sampled": 9 * 30, "trained": 200, "replayed": 0},
        "conversations": {"records": 9, "segments": 18, "continuations": 27, "drifts": 9},
    }
    points = [(point.step, point.records, point.success) for point in report.curve]
    assert points == [(0, 4, 0.25), (1, 4, 0.75)]
    written = json.loads(write_summary(tmp_path, report.summary).read_text())
    assert written == asdict(report.summary)


async def test_a_run_without_evaluations_or_steps_has_a_summary_too(
    database: RunDatabase, tmp_path: Path
) -> None:
    report = await gather_report(database, tmp_path, seconds=1)
    assert report.summary.eval_after is None and report.summary.reward_last is None
    assert draw_curve(tmp_path, "demo", report).is_file()


async def test_the_curve_is_a_picture_with_the_held_out_points_in_it(
    database: RunDatabase, tmp_path: Path
) -> None:
    await add_run(database, tmp_path)
    image = imread(draw_curve(tmp_path, "demo", await gather_report(database, tmp_path, 60)))
    assert image.shape[0] > 400 and image.shape[1] > 800
    red = np.array([0xB3, 0x26, 0x1E]) / 255
    assert (np.abs(image[..., :3] - red).max(axis=-1) < 0.02).sum() > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "metrics.jsonl"]


def test_the_figures_of_the_trainer_are_panels_as_far_as_a_run_has_them(tmp_path: Path) -> None:
    assert draw_training(tmp_path, "demo", []).is_file()
    lines: list[dict[str, float | None]] = [
        {"step": step, "loss": 0.1, "grad_norm": 1.0 / step, "entropy": None, "mismatch_kl": 0.01}
        for step in (1, 2, 3)
    ]
    few = imread(draw_training(tmp_path, "demo", lines))
    more = [{**line, "entropy": 1.0, "staleness_mean": 0.5, "train_seconds": 2.0} for line in lines]
    many = imread(draw_training(tmp_path, "demo", more))
    assert few.shape[1] == many.shape[1] > 800
    assert many.shape[0] > 1.8 * few.shape[0], "a second row of panels"


async def test_a_snapshot_tells_the_recent_success_the_rates_and_the_time_left(
    database: RunDatabase, tmp_path: Path
) -> None:
    await add_run(database, tmp_path)
    await database.runs.insert_one({"_id": database.name, "status": "training", "step": 2,
                                    "max_steps": 12})  # fmt: skip
    snapshot = await ProgressReader(database, tmp_path).read()
    assert (snapshot.status, snapshot.step, snapshot.max_steps) == ("training", 2, 12)
    assert snapshot.success == snapshot.reward == 0.5  # 4 of the 8 training records with a score
    assert snapshot.waiting == 2
    assert snapshot.trained_per_s == 50
    assert snapshot.seconds_left == 20
    assert snapshot.sampled_per_s is not None and snapshot.sampled_per_s > 0
    assert [(e.step, e.success) for e in snapshot.held_out] == [(0, 0.5), (1, 1.0)]


async def test_a_run_without_a_trainer_tells_the_time_left_for_its_groups(
    database: RunDatabase, tmp_path: Path
) -> None:
    await database.runs.insert_one({"_id": database.name, "status": "sampling", "n_groups": 11})
    reader, began = ProgressReader(database, tmp_path), time.monotonic()
    assert (await reader.read()).seconds_left is None, "nothing has ended yet"
    await asyncio.sleep(1)
    for name in ("a", "b"):
        await add_group(database, [1, 0], name=name)
    now = datetime.now(UTC)
    await database.tasks.update_many({}, {"$set": {"completed_at": now}})
    snapshot = await reader.read()
    assert snapshot.groups == (2, 11) and snapshot.seconds_left is not None
    # 9 groups are left, and 2 took a second or as long as this test.
    assert 4.5 <= snapshot.seconds_left <= 9 / 2 * (time.monotonic() - began)


async def test_groups_that_still_run_count_neither_in_the_curve_nor_in_recent_success(
    database: RunDatabase, tmp_path: Path
) -> None:
    await publish(database, 0, 0, "v0")
    await publish(database, 1, 1, "v1")
    running = TaskStatus.RUNNING
    await add_group(database, [0, 0], name="early", version=0, status=running)
    assert await success_curve(database) == []
    assert (await ProgressReader(database, tmp_path).read()).success is None
    await add_group(database, [1, 1, 0, 0], name="ended", version=0)
    await add_group(database, [1, 0], name="next", version=1)
    await add_group(database, [0, 0, 0], name="late", version=1, status=running)
    points = await success_curve(database)
    # Of step 1, two records are in a group that ended, and three in one that did not.
    assert [(p.step, p.records, p.success, p.reward) for p in points] == [(0, 4, 0.5, 0.5)]
    snapshot = await ProgressReader(database, tmp_path).read()
    assert snapshot.success == snapshot.reward == 0.5 and snapshot.history == (0.5,)
    await database.tasks.update_one({"_id": "late"}, {"$set": {"status": TaskStatus.COMPLETED}})
    assert [point.success for point in await success_curve(database)] == [0.5, 0.2]


async def test_samplers_that_are_blocked_or_dead_are_why_no_step_comes(
    database: RunDatabase, tmp_path: Path
) -> None:
    await database.runs.insert_one({"_id": database.name, "status": "training", "step": 0,
                                    "rows_per_step": 4})  # fmt: skip
    await register_urls(database, ["http://127.0.0.1:1"])
    await database.services.update_many({}, [{"$set": {"heartbeat": "$$NOW"}}])
    await add_group(database, [None, None], name="held", status=TaskStatus.RUNNING)
    held = {"slots.$[].status": "leased", "slots.$[].owner": "one"}
    reader = ProgressReader(database, tmp_path)
    for age, said in ((timedelta(minutes=1), None), (timedelta(minutes=-1), "of 2 rollouts")):
        expires = datetime.now(UTC) + age
        await database.tasks.update_one(
            {"_id": "held"}, {"$set": {**held, "slots.$[].lease_expires": expires}}
        )
        why = (await reader.read()).why_no_step
        assert (said in why and "asyncio.to_thread" in why) if said and why else why is said


async def test_a_snapshot_of_a_run_that_goes_on_has_its_past_and_what_is_under_way(
    database: RunDatabase, tmp_path: Path
) -> None:
    await add_run(database, tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    line = metrics_line(3, loss=0.25, grad_norm=1.5, mismatch_kl=0.001, reference_kl=0.02)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line)
    await add_group(database, [None], name="stopped")
    for record, error in (("c-t1-a0", "KeyError: 'x'"), ("stopped-t0-a0", "handed back: it ends")):
        failed = {"status": "failed", "error": error}
        await database.records.update_one({"_id": record}, {"$set": failed})
    reader = ProgressReader(database, tmp_path)
    snapshot = await reader.read()
    assert snapshot.history == (0.25, 0.75, 0.5), "by the steps before, and of now"
    assert (snapshot.loss, snapshot.grad_norm) == (0.25, 1.5)
    assert (snapshot.kl, snapshot.reference_kl) == (0.001, 0.02)
    assert snapshot.attempts == AttemptCounts(), "none of them since this launch"
    await database.records.update_many({}, [{"$set": {"finished_at": "$$NOW"}}])
    snapshot = await reader.read()
    ended = await database.records.count_documents({"finished_at": {"$ne": None}}) - 1
    assert snapshot.attempts == AttemptCounts(ended, 1, ((1, "KeyError: 'x'"),)), (
        "handed back is not failed"
    )
    assert snapshot.checkpoint == 2
    assert snapshot.evaluating == Evaluating(step=2, done=1, rollouts=1)

    await add_group(database, [1.0], name="after", split=Split.EVAL, epoch=3)
    assert [e.step for e in (await reader.read()).held_out] == [0, 1, 3]
    await database.tasks.update_one({"task_id": "open"}, {"$set": {"status": "completed"}})
    done = await reader.read()
    assert [e.step for e in done.held_out] == [0, 1, 2, 3] and done.evaluating is None


async def test_samplers_elsewhere_are_those_at_work_that_this_launch_did_not_start(
    database: RunDatabase, tmp_path: Path
) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        here, host = socket.gethostname(), "node-7"
        names = {
            "ours": f"{here}-{child.pid}-abcdef",
            "another launch": f"{here}-{os.getppid()}-abcdef",
            "dead": f"{here}-{2**22 + 1}-abcdef",
            "another machine": f"{host}-{child.pid}-abcdef",
            "its lease is over": f"{host}-8-abcdef",
        }
        await add_group(database, [None] * 5, name="a", status=TaskStatus.RUNNING)
        soon = datetime.now(UTC) + timedelta(seconds=60)
        for place, (what, owner) in enumerate(names.items()):
            ends = soon - timedelta(seconds=120 if "over" in what else 0)
            slot = {"status": "leased", "owner": owner, "lease_expires": ends}
            changes = {f"slots.{place}.{field}": value for field, value in slot.items()}
            await database.tasks.update_one({}, {"$set": changes})
        # Between two rollouts a sampler holds no lease, but has just ended one.
        await database.records.update_many({}, {"$set": {"owner": f"{host}-9-abcdef"}})
        assert (await ProgressReader(database, tmp_path).read()).samplers_elsewhere == 3
        child.kill()


async def test_a_snapshot_of_a_run_that_has_not_begun_is_empty(
    database: RunDatabase, tmp_path: Path
) -> None:
    assert await ProgressReader(database, tmp_path / "none").read() == Snapshot(waiting=0)


def test_metrics_are_read_as_they_are_written_and_anew_after_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = MetricsTail(file)
    tail.read()
    assert not tail.recent
    file.write_text(metrics_line(1) + metrics_line(2)[:10])
    tail.read()
    assert [line["step"] for line in tail.recent] == [1]
    file.write_text(metrics_line(1) + metrics_line(2))
    tail.read()
    assert [line["step"] for line in tail.recent] == [1, 2]
    anew = tmp_path / "anew"
    anew.write_text(metrics_line(1) + metrics_line(2) + metrics_line(3))
    anew.rename(file)
    tail.read()
    assert [line["step"] for line in tail.recent] == [1, 2, 3]


async def test_an_evaluation_is_summed_up_by_task_with_failed_attempts_apart(
    database: RunDatabase, tmp_path: Path
) -> None:
    await add_group(database, [1, 0], name="x", split=Split.EVAL, epoch=-3)
    await add_group(database, [1, None], name="y", split=Split.EVAL, epoch=-3)
    await add_group(database, [0, 0], name="other", split=Split.EVAL, epoch=-2)
    await add_group(database, [0, 1], name="z", split=Split.EVAL, epoch=-3)
    unscored = {"slots.0.score": None, "slots.1.score": None}  # by a scorer with nothing to say
    await database.tasks.update_one({"task_id": "z"}, {"$set": unscored})
    rollouts = await read_rollouts(database, -3)
    tasks = tmp_path / "held out.jsonl"
    tasks.write_text("one")
    report = summarise_rollouts("demo", "checkpoint-7", 7, -3, rollouts, HeldOutFile.of(tasks))
    assert (report.tasks, report.rollouts) == (3, 3)
    assert (report.failed_rollouts, report.unscored_rollouts) == (1, 2)
    assert report.pass_at[1].mean == pytest.approx((0.5 + 1) / 2)
    assert report.pass_at[2].mean == 1.0
    assert report.mean_turns.mean == pytest.approx((2.5 + 2) / 2)
    first = write_report(tmp_path, report)
    assert re.fullmatch(r"checkpoint-7-held out-[0-9a-f]{8}\.json", first.name)
    written = json.loads(first.read_text())["pass_at"]
    assert (written["1"]["mean"], written["1"]["tasks"], written["2"]["tasks"]) == (0.75, 2, 1)
    tasks.write_text("other tasks of the same name")
    other = summarise_rollouts("demo", "checkpoint-7", 7, -4, rollouts, HeldOutFile.of(tasks))
    second = write_report(tmp_path, other)
    assert (write_report(tmp_path, report), write_report(tmp_path, other)) == (first, second)
    assert [json.loads(path.read_text())["epoch"] for path in (first, second)] == [-3, -4]
    # Other flags have another file, and the same flags the same one beside any other models.
    flags = {"flags": {"max_turns": 3}}
    third = write_report(tmp_path, replace(report, set_up=flags))
    assert third not in (first, second) and json.loads(third.read_text())["set_up"] == flags
    beside = replace(report, checkpoint="/home/me/a/model"), replace(report, checkpoint="a/model")
    assert len({write_report(tmp_path, one) for one in beside}) == 1
    with pytest.raises(ValueError):
        summarise_rollouts(
            "demo", "c", 7, -3, [TaskRollouts("x", [], [], 2, 1)], HeldOutFile.of(tasks)
        )


async def test_training_on_the_right_ones_is_advised_only_if_there_are_some(
    database: RunDatabase,
) -> None:
    config = parse_config(["--run_name", database.name, "--model_name_or_path", "model"])
    await add_group(database, [0.0, 0.5], name="a")
    assert not any(
        "train on the right" in line for line in await sampled_lines(database, config, 1.0)
    )
    await add_group(database, [0.0, 1.0], name="b")
    assert any("train on the right" in line for line in await sampled_lines(database, config, 1.0))


async def test_a_trajectory_is_printed_with_its_calls_results_and_score(
    database: RunDatabase,
) -> None:
    await add_group(database, [1.0], name="a")
    turn = DispatchedSamplingTask(
        id="t", record_id="a-t0-a0", turn=0, segment=0, service="s",
        messages=[{"role": "user", "content": "How many bolts?"}], prompt_delta_ids=b"",
        prompt_len=0, output_ids=b"", output_logprobs=b"", output_text="let me look",
        tool_calls=[ToolCall(name="stock", arguments={"bin": "Q6"}, result="27")],
        finish_reason="stop", versions=[], generate_latency_s=0.1, created_at=datetime.now(UTC),
    )  # fmt: skip
    await database.turns.insert_one(turn.to_mongo())
    found = ToolCall(name="find", arguments={"item": "bolt"}, result="Q6", by_agent=True)
    changes = {"own_calls": [found.model_dump()], "tools_offered": ["find", "stock"]}
    await database.records.update_one({"_id": "a-t0-a0"}, {"$set": changes})
    await database.tasks.update_one({"_id": "a"}, {"$set": {"answer": "twenty-seven"}})
    record = await find_record(database, None, Split.TRAIN)
    answer = await right_answer(database, record)
    out = io.StringIO()
    print_record(
        Console(file=out, width=100), record, await read_turns(database, record.id), answer
    )
    for words in ("a-t0-a0", "How many bolts?", "let me look", "→ stock(bin='Q6')", "27", "score 1",
                  "agent → find(item='bolt')", "tools in the prompt: find, stock",
                  "right answer twenty-seven"):  # fmt: skip
        assert words in out.getvalue()
    with pytest.raises(ConfigError, match="no record 'nope'"):
        await find_record(database, "nope", Split.TRAIN)
    with pytest.raises(ConfigError, match="no finished record of split eval"):
        await find_record(database, None, Split.EVAL)


async def test_tasks_with_attempts_given_up_are_listed_with_their_last_error(
    database: RunDatabase,
) -> None:
    assert await failed_tasks(database) == []
    lines = [TaskLine(id=name, query="?") for name in ("good", "bad")]
    sampler = TaskLedger(database, "s", lease_seconds=30, max_failures=1)
    await sampler.add(make_tasks(lines, Split.TRAIN, 3, 2, range(2)))
    for claim in [*await sampler.claim(Split.TRAIN, count=2)]:
        await sampler.complete(claim, 1.0)
    first, second = await sampler.claim(Split.TRAIN, count=2)
    await sampler.complete(first, 0.0)
    await sampler.fail(second, "ToolError: [the tool] broke")
    [n_failing] = await failed_tasks(database)
    assert (n_failing.task_id, n_failing.failed, n_failing.rollouts) == ("bad", 1, 2)
    out = io.StringIO()
    print_failed_tasks(Console(file=out, width=120), [n_failing], 1, 20)
    for words in (
        "bad",
        "train",
        "3",
        "1 of 2 rollouts given up",
        second.record_id,
        "ToolError: [the tool] broke",
    ):
        assert words in out.getvalue()
    assert "good" not in out.getvalue()


def test_tasks_that_failed_alike_are_one_error_with_some_of_their_names() -> None:
    def failed(number: int, error: str) -> FailedTask:
        return FailedTask(
            id=f"train-{number}", task_id=f"t{number}", split=Split.TRAIN, epoch=number, failed=1,
            quarantined=0, again=2, group=False, rollouts=4, error=error, record=f"r{number}",
        )  # fmt: skip

    tasks = [failed(n, f"KeyError: 'bolt {n}' (at own.py:7)") for n in range(5)]
    tasks.insert(1, failed(9, "ValueError: no number (at own.py:9)"))

    def lines(count: int) -> list[str]:
        out = io.StringIO()
        print_failed_tasks(Console(file=out, width=60), tasks, 6, count)
        return out.getvalue().splitlines()

    head, error, one, *_ = lines(2)
    assert head == (
        "5 tasks, 5 of 20 rollouts given up, 10 of 20 rollouts tried again: t4 (train epoch 4, "
        "record r4), t3 (train epoch 3, record r3), t2 (train epoch 2, record r2) and 2 more"
    )
    assert error == "    KeyError: 'bolt 4' (at own.py:7)"  # the newest
    assert one.startswith("1 task, 1 of 4 rollouts") and one.endswith(
        ": t9 (train epoch 9, record r9)"
    )
    assert lines(1) == [head, error, "and 1 other error (--count)"]
    alike = [QuarantinedItem("row", f"r{n}", "RowError: odd") for n in range(4)]
    out = io.StringIO()
    print_quarantined(Console(file=out, width=60), "demo", alike, 4, 20)
    assert out.getvalue().splitlines() == [
        "row r0, row r1, row r2 and 1 more are in quarantine", "    RowError: odd",
        "`agentrl release demo` puts back what is in quarantine",
    ]  # fmt: skip


def test_the_next_commands_name_the_run_where_it_is() -> None:
    lines = next_steps(parse_config(["--run_name", "demo"]), "grpo_example.sh")
    assert len(lines) == 4
    assert lines[0].endswith("agentrl show demo") and lines[1].endswith("agentrl view demo")
    assert lines[2].endswith("./eval_example.sh demo")
    elsewhere = parse_config(["--run_name", "demo", "--output_dir", "/data/x"])
    assert next_steps(elsewhere, "grpo_example.sh")[2].endswith("demo --output_dir /data/x")


def test_what_to_type_next_fits_the_folder_and_the_path_of_whoever_called_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(["--run_name", "demo"])
    ours = Path(sys.prefix) / "bin"
    monkeypatch.setenv("PATH", f"{ours}:/usr/bin")
    monkeypatch.delenv("AGENTRL_CALLER_PATH", raising=False)
    assert agentrl_command() == "agentrl"
    monkeypatch.setenv("AGENTRL_CALLER_PATH", "/usr/bin")  # the script put ours on its own path
    monkeypatch.chdir(ours.parent.parent)
    assert agentrl_command() == f"{ours.parent.name}/bin/agentrl"
    monkeypatch.chdir(tmp_path)
    show, _, evaluate, train = next_steps(config, "grpo_example.sh")
    assert show.endswith(f" {ours / 'agentrl'} show demo")
    assert evaluate.endswith(f" {REPOSITORY / 'eval_example.sh'} demo")
    assert train.endswith(f" {REPOSITORY / 'grpo_example.sh'} NAME")
    (tmp_path / "agentrl").symlink_to("/bin/true")  # another one is first on the caller's path
    monkeypatch.setenv("AGENTRL_CALLER_PATH", f"{tmp_path}:{ours}")
    assert agentrl_command() == str(ours / "agentrl")
