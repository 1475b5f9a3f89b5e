"""A stored Record with its turns, found and written as JSON."""

from collections.abc import Sequence
from typing import Any

from agentrl.configs import ConfigError
from agentrl.databases.arrays import unpack_floats, unpack_ints
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DispatchedSamplingTask, Record, Split


async def find_record(database: RunDatabase, record_id: str | None, split: Split) -> Record:
    """The Record with the given id; for None the split's newest one with a score.

    Raises `ConfigError` if there is none.
    """
    if record_id is not None:
        # A word of the command line that is no UTF-8 is no id.
        sound = record_id.encode(errors="replace").decode() == record_id
        document = await database.records.find_one({"_id": record_id}) if sound else None
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


async def read_turns(database: RunDatabase, record_id: str) -> list[DispatchedSamplingTask]:
    """A Record's turns, in order; none if there is no such Record."""
    cursor = database.turns.find({"record_id": record_id}).sort("turn", 1)
    return [DispatchedSamplingTask.from_mongo(document) async for document in cursor]


async def right_answer(database: RunDatabase, record: Record) -> str | None:
    """The right answer of the Record's task; None if the task has none."""
    task = await database.tasks.find_one({"_id": record.task}, {"answer": 1})
    return None if task is None else task["answer"]


def record_json(record: Record) -> dict[str, Any]:
    """The Record as JSON has it: times are ISO texts, and `id` is its id."""
    return record.model_dump(mode="json", fallback=str)


def trajectory_json(
    record: Record, turns: Sequence[DispatchedSamplingTask], answer: str | None
) -> dict[str, Any]:
    """The same with the turns, whose token arrays are lists, and the task's right answer."""
    return {
        **record_json(record),
        "right_answer": answer,
        "turns": [_turn_json(turn) for turn in turns],
    }


def _turn_json(turn: DispatchedSamplingTask) -> dict[str, Any]:
    arrays = {
        "prompt_delta_ids": unpack_ints(turn.prompt_delta_ids).tolist(),
        "output_ids": unpack_ints(turn.output_ids).tolist(),
        "output_logprobs": unpack_floats(turn.output_logprobs).tolist(),
    }
    return turn.model_dump(mode="json", exclude=set(arrays), fallback=str) | arrays
