"""A large run's database and folder, made of the documents of a small real one.

A part of `viewer.py`. Each group of the new run is a group of the source with other ids, epoch,
time and policy version. Its Records have more turns: the source's are repeated until there are
enough, and the rows are built of them again, so that turns, Records and rows fit together.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database

from agentrl.databases.arrays import pack_ints, unpack_ints
from agentrl.databases.connection import connect
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    group_order,
)
from agentrl.databases.records import turn_id
from agentrl.databases.tasks import record_id
from agentrl.rollout.groups.row_building import build_row

TURNS = 10  # of a Record
GROUPS_OF_EPOCH = 250
GROUPS_OF_STEP = 8
STEPS_BETWEEN_EVALUATIONS = 50
LONG_RECORD = "train-0-long-t0-a0"
LONG_TURNS, LONG_TOKENS = 200, 128_000
_BATCH = 500  # groups
_FINISHED = {"status": "completed", "epoch": 0}
_STEP_S = 20.0

Document = dict[str, Any]


@dataclass(frozen=True)
class _Group:
    """A group of the source: its Task, and of each Record the document, its turns and its row."""

    task: Document
    records: list[tuple[Document, list[Document], Document]]


@dataclass(frozen=True)
class Filled:
    """What the new run has."""

    records: int
    turns: int
    steps: int


async def fill(
    source: Database[Document], url: str, name: str, folder: Path, groups: int
) -> Filled:
    """Make database `name` at `url`, and the run's folder, with so many training groups."""
    await (await connect(url, name)).close()  # which makes the indexes
    trained, held_out = _groups_of(source, "train"), _groups_of(source, "eval")
    steps = groups // GROUPS_OF_STEP
    began = datetime.now(UTC) - timedelta(seconds=steps * _STEP_S)
    with MongoClient[Document](url, tz_aware=True) as client:
        target = client[name]
        for start in range(0, groups, _BATCH):
            batch = range(start, min(start + _BATCH, groups))
            _insert(target, (_copied(trained[n % len(trained)], n, began) for n in batch))
        evaluated = range(0, steps + 1, STEPS_BETWEEN_EVALUATIONS)
        for step in evaluated:
            _insert(target, (_evaluated(group, step, began) for group in held_out))
        _insert(target, [_long(trained[0], began)])
        lines = _lines(source, steps)
        target["step_metrics"].insert_many(lines)
        target["policy_versions"].insert_many(_versions(source, steps))
        for each in ("runs", "tool_lists"):
            for document in source[each].find():
                if each == "runs":
                    ended = {"step": steps, "max_steps": steps, "version": steps}
                    document = {**document, "_id": name, **ended}
                target[each].insert_one(document)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line["values"]) + "\n" for line in lines)
        )
        return Filled(
            target["records"].estimated_document_count(),
            target["dispatched_sampling_tasks"].estimated_document_count(),
            steps,
        )


def _groups_of(source: Database[Document], split: str) -> list[_Group]:
    found = []
    for task in source["tasks"].find(_FINISHED | {"split": split}).sort("_id", 1):
        records = []
        for document in source["records"].find({"task": task["_id"]}).sort("rollout", 1):
            turns = list(source["dispatched_sampling_tasks"].find({"record_id": document["_id"]}))
            record, longer = _longer(document, sorted(turns, key=lambda turn: turn["turn"]), TURNS)
            records.append((record, longer, _row(record, longer, task["group_order"])))
        found.append(_Group(task, records))
    return found


def _longer(
    record: Document, turns: Sequence[Document], count: int, added: int = 0
) -> tuple[Document, list[Document]]:
    """A Record with `count` turns. `added`: tokens that each turn has beside the source's."""
    longer: list[Document] = []
    length = 0
    for number in range(count):
        turn = (
            dict(turns[0] if number == 0 else turns[1:][(number - 1) % (len(turns) - 1)])
            if len(turns) > 1
            else dict(turns[0])
        )
        delta = unpack_ints(turn["prompt_delta_ids"]).tolist()
        delta += [delta[at % len(delta)] for at in range(added)]
        length += len(delta)
        turn |= {"turn": number, "prompt_len": length, "prompt_delta_ids": pack_ints(delta)}
        length += len(turn["output_ids"]) // 4
        longer.append(turn)
    generated = sum(len(turn["output_ids"]) // 4 for turn in longer)
    tokens = {**record["tokens"], "generated": generated}
    tokens["observed"] = length - generated - tokens["prompt"]
    calls = sum(len(turn["tool_calls"]) for turn in longer)
    counted = {"n_turns": count, "n_tool_calls": calls, "n_continuations": count - 1}
    return {**record, "tokens": tokens, **counted, "turn_statuses": {"completed": count}}, longer


def _row(record: Document, turns: Sequence[Document], order: int) -> Document:
    row = build_row(
        Record.from_mongo({**record, "turns": []}),
        [DispatchedSamplingTask.from_mongo(turn) for turn in turns],
        record["advantage"] or 0.0, 1.0, order,
    )  # fmt: skip
    return row.to_mongo()


def _copied(
    group: _Group, number: int, began: datetime
) -> tuple[Document, list[Document], list[Document], list[Document]]:
    """Group `number` of the new run: its Task, Records, turns and rows."""
    epoch, seq = divmod(number, GROUPS_OF_EPOCH)
    step = number // GROUPS_OF_STEP
    name = f"train-{epoch}-{group.task['task_id']}-{seq}"
    places = {
        "epoch": epoch, "task_id": f"{group.task['task_id']}-{seq}",
        "group_order": group_order(epoch, seq), "seq": seq,
    }  # fmt: skip
    when = began + timedelta(seconds=step * _STEP_S, milliseconds=number % GROUPS_OF_STEP * 2000)
    trained = {"step": step + 1, "trainer": "trainer", "fence": 1}
    return _made(group, name, places, step, when, {"status": "trained", "trained": [trained]})


def _evaluated(
    group: _Group, step: int, began: datetime
) -> tuple[Document, list[Document], list[Document], list[Document]]:
    name = f"eval-{step}-{group.task['task_id']}"
    places = {
        "epoch": step, "task_id": group.task["task_id"],
        "group_order": group_order(step, group.task["seq"]),
    }  # fmt: skip
    return _made(group, name, places, step, began + timedelta(seconds=step * _STEP_S), None)


def _made(
    group: _Group, name: str, places: Document, version: int, when: datetime, row: Document | None
) -> tuple[Document, list[Document], list[Document], list[Document]]:
    records, turns, rows = [], [], []
    slots = []
    for slot, (record, own, row_of_it) in zip(group.task["slots"], group.records, strict=False):
        identity = record_id(name, record["rollout"], record["attempt"])
        slots.append({**slot, "record": identity})
        ended = when + timedelta(seconds=record["rollout"])
        records.append({
            **record, "_id": identity, "task": name, "epoch": places["epoch"],
            "task_id": places["task_id"], "turns": [turn_id(identity, n) for n in range(len(own))],
            "versions": {"min": version, "max": version}, "started_at": when, "sampled_at": ended,
            "finished_at": ended,
        })  # fmt: skip
        turns += [
            {**turn, "_id": turn_id(identity, n), "record_id": identity, "created_at": ended}
            for n, turn in enumerate(own)
        ]
        if row is not None:
            order = places["group_order"]
            rows.append({
                **row_of_it, **row, "_id": identity, "task": name, "group_order": order,
                "policy_versions": [version],
            })  # fmt: skip
    task = {**group.task, **places, "_id": name, "slots": slots, "completed_at": when}
    return task, records, turns, rows


def _long(
    group: _Group, began: datetime
) -> tuple[Document, list[Document], list[Document], list[Document]]:
    """A group of one Record with `LONG_TURNS` turns and about `LONG_TOKENS` tokens."""
    record, turns, _ = group.records[0]
    added = LONG_TOKENS // LONG_TURNS - sum(
        len(turn["prompt_delta_ids"] + turn["output_ids"]) // 4 for turn in turns
    ) // len(turns)
    long, own = _longer(record, turns, LONG_TURNS, added)
    row = _row(long, own, 0)
    one = _Group(group.task, [(long, own, row)])
    places = {"epoch": 0, "task_id": "long", "seq": 10**6, "group_order": group_order(0, 10**6)}
    trained = {"step": 1, "trainer": "trainer", "fence": 1}
    ended = {"status": "trained", "trained": [trained]}
    return _made(one, LONG_RECORD.removesuffix("-t0-a0"), places, 0, began, ended)


def _insert(
    target: Database[Document],
    made: Iterator[Any] | Sequence[tuple[Document, list[Document], list[Document], list[Document]]],
) -> None:
    tasks: list[Document] = []
    others: Mapping[str, list[Document]] = {
        "records": [], "dispatched_sampling_tasks": [], "record_data": [],
    }  # fmt: skip
    for task, *rest in made:
        tasks.append(task)
        for collected, of_group in zip(others.values(), rest, strict=True):
            collected += of_group
    for name, documents in {"tasks": tasks, **others}.items():
        if documents:
            target[name].insert_many(documents, ordered=False)


def _lines(source: Database[Document], steps: int) -> list[Document]:
    known = [each["values"] for each in source["step_metrics"].find().sort("step", 1)]
    return [
        {
            "_id": f"{1:09}-{step}", "step": step, "fence": 1,
            "values": {**known[step % len(known)], "step": step, "version": step - 1},
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip


def _versions(source: Database[Document], steps: int) -> list[Document]:
    first = source["policy_versions"].find_one({"version": 0})
    assert first is not None, "the source run published nothing"
    return [
        {**first, "_id": str(version), "version": version, "step": version}
        for version in range(steps + 1)
    ]
