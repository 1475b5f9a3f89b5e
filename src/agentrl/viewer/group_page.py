"""Tasks by what was learned of them, and the rollouts of one group side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.databases.documents import Record, Split, Task, TaskStatus
from agentrl.databases.success import SUCCESS_SCORE
from agentrl.viewer.address import order_in, split_in, text_in
from agentrl.viewer.places import Place

SHOWN = 200
ORDERS: dict[str, dict[str, int]] = {  # of tasks
    "newest": {"newest": -1},
    "learned": {"learned": -1, "newest": -1},
    "hardest": {"last": 1, "newest": -1},
}
_READ = 20_000  # newest groups of which the table is made
_SCORES = {"$filter": {"input": "$slots.score", "as": "score", "cond": {"$ne": ["$$score", None]}}}
_SUCCESS = {  # of a group; null without a score
    "$avg": {
        "$map": {
            "input": _SCORES,
            "as": "score",
            "in": {"$cond": [{"$gte": ["$$score", SUCCESS_SCORE]}, 1, 0]},
        }
    }
}
_LEARNED = {
    "$cond": [
        {"$gt": [{"$size": "$known"}, 1]},
        {"$subtract": [{"$first": "$known"}, {"$last": "$known"}]},
        None,
    ]
}


@dataclass(frozen=True)
class TaskLine:
    """A task over its epochs. `successes`: by epoch, None where no rollout has a score."""

    task_id: str
    query: str
    epochs: list[tuple[int, str, float | None]]  # number, id of the group, success
    learned: float | None  # success of the last epoch less that of the first, of two or more


@dataclass(frozen=True)
class Said:
    """What a rollout said in a turn. `same`: as the best rollout did, up to here."""

    text: str
    same: bool


@dataclass(frozen=True)
class GroupPage:
    """A group. `records`: the last attempt of each rollout, in order. `said`: by Record."""

    task: Task
    records: list[Record]
    said: dict[str, list[Said]]
    before: str | None  # the groups before and after it, by id
    after: str | None


async def read_tasks(place: Place, asked: Mapping[str, str]) -> list[TaskLine]:
    """The tasks that were begun, of the newest groups.

    `asked`: `text`, which id or query must have; `order`: `newest`, `learned` (the most first) or
    `hardest` (least success in the last epoch); `split`. Raises `AddressError`.
    """
    begun = {"$nin": [TaskStatus.CREATED, TaskStatus.LEFT_OUT]}
    wanted: dict[str, Any] = {"split": await split_of(place, asked), "status": begun}
    order = order_in(asked, ORDERS)
    if text := text_in(asked):
        pattern = {"$regex": re.escape(text), "$options": "i"}
        wanted["$or"] = [{"task_id": pattern}, {"query": pattern}]
        return await _lines(place, wanted, order)
    name = f"tasks of {wanted['split']}, {order}"
    return await place.kept.get(name, lambda: _lines(place, wanted, order))


async def _lines(place: Place, wanted: dict[str, Any], order: str) -> list[TaskLine]:
    cursor = await place.database.tasks.aggregate(
        [
            {"$match": wanted},
            {"$sort": {"group_order": -1}},
            {"$limit": _READ},
            {"$project": {"task_id": 1, "epoch": 1, "group_order": 1, "success": _SUCCESS}},
            {
                "$group": {
                    "_id": "$task_id",
                    "newest": {"$max": "$group_order"},
                    "epochs": {"$push": {"number": "$epoch", "id": "$_id", "success": "$success"}},
                    "known": {"$push": {"$ifNull": ["$success", "$$REMOVE"]}},
                }
            },
            *([{"$match": {"known": {"$ne": []}}}] if order == "hardest" else []),
            # Of the newest known success and the oldest, of two or more; null sorts lowest.
            {"$set": {"last": {"$first": "$known"}, "learned": _LEARNED}},
            {"$sort": ORDERS[order]},
            {"$limit": SHOWN},
        ],
        allowDiskUse=True,
    )
    lines = [line async for line in cursor]
    groups = [line["epochs"][0]["id"] for line in lines]
    queries = {
        task["task_id"]: task["query"]
        async for task in place.database.tasks.find(
            {"_id": {"$in": groups}}, {"task_id": 1, "query": 1}
        )
    }
    return [
        TaskLine(
            line["_id"],
            queries.get(line["_id"], ""),
            [(each["number"], each["id"], each["success"]) for each in reversed(line["epochs"])],
            line["learned"],
        )
        for line in lines
    ]


async def split_of(place: Place, asked: Mapping[str, str]) -> Split:
    """The split that was asked for; else training, or evaluation while only that has Records."""
    if (named := split_in(asked)) is not None:
        return named
    for split in (Split.TRAIN, Split.EVAL):
        if await place.database.records.find_one({"split": split}, {"_id": 1}) is not None:
            return split
    return Split.TRAIN


async def read_group_page(place: Place, task_id: str) -> GroupPage | None:
    """The group of this id (`Task._id`); None if there is none."""
    database = place.database
    document = await database.tasks.find_one({"_id": task_id})
    if document is None:
        return None
    task = Task.from_mongo(document)
    last: dict[int, Record] = {}
    async for found in database.records.find({"task": task_id}).sort("attempt", 1):
        record = Record.from_mongo(found)
        last[record.rollout] = record
    places = {"split": task.split}
    before = await database.tasks.find_one(
        {**places, "group_order": {"$lt": task.group_order}}, {"_id": 1},
        sort=[("group_order", -1)],
    )  # fmt: skip
    after = await database.tasks.find_one(
        {**places, "group_order": {"$gt": task.group_order}}, {"_id": 1},
        sort=[("group_order", 1)],
    )  # fmt: skip
    records = [last[rollout] for rollout in sorted(last)]
    return GroupPage(
        task,
        records,
        await _said(place, records),
        before["_id"] if before else None,
        after["_id"] if after else None,
    )


async def _said(place: Place, records: Sequence[Record]) -> dict[str, list[Said]]:
    """What each rollout said, beside the best one."""
    texts: dict[str, list[str]] = {record.id: [] for record in records}
    found = place.database.turns.find(
        {"record_id": {"$in": list(texts)}}, {"record_id": 1, "output_text": 1}
    ).sort([("record_id", 1), ("turn", 1)])
    async for turn in found:
        texts[turn["record_id"]].append(turn["output_text"])
    scored = [record for record in records if record.score is not None]
    best = max(scored, key=lambda record: record.score or 0.0, default=None)
    model = texts[best.id] if best else []
    said: dict[str, list[Said]] = {}
    for record, own in texts.items():
        n_same = 0
        while n_same < min(len(own), len(model)) and own[n_same] == model[n_same]:
            n_same += 1
        said[record] = [Said(text, at < n_same) for at, text in enumerate(own)]
    return said
