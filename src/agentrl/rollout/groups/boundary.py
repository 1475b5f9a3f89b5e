"""The one boundary: what is checked before a Record is scored, settled, or made a row of.

    check_sampled    a Record whose conversation is over: valid, and every turn is stored
    check_scored     a Record with its score: valid, and its scores can be computed with
    check_row        a row: its numbers are finite, it has tokens to train

Replaying the turns to the row's tokens (`row_building.py`) is the fourth check: it raises too.
What people read of a Record cannot fail here: it is made storable where it is written
(`databases/storable.py`), and a row may have any size (`databases/row_parts.py`).

Each raises `ValueError` with what is wrong and where. What follows is the caller's: an attempt
fails, a scoring is tried again, a Record is quarantined.
"""

import math
from collections.abc import Mapping
from typing import SupportsFloat

import numpy as np
from pydantic import ValidationError

from agentrl.databases.documents import DBRecordData, Record
from agentrl.databases.records import turn_id
from agentrl.foreign_text import shown

LARGEST_SCORE = 1e9  # float32 holds the squares of such advantages, summed over a step


def check_sampled(record: Record, record_id: str, n_turns: int) -> None:
    """Check what `run()` returned for the Record `record_id`: it is that Record and valid, and all
    `n_turns` generated turns are stored, in order. Raises ValueError."""
    _check_document(record, record_id, "run()")
    wanted = [turn_id(record.id, turn) for turn in range(n_turns)]
    missing = sorted(set(wanted) - set(record.turns))
    if missing:
        raise ValueError(
            f"the agent generated {n_turns} turns and stored {len(record.turns)}: {missing[0]} is "
            "missing (each turn needs `write_turn`)"
        )
    if record.turns != wanted:
        raise ValueError(f"the agent stored its {n_turns} turns as {record.turns[:8]}")


def check_scored(record: Record, record_id: str) -> Record:
    """The scored Record `record_id` with its scores as floats or None.

    Raises ValueError for another or an invalid Record, and for a score that is not finite or beyond
    `LARGEST_SCORE`: the statistics of its group would overflow.
    """
    _check_document(record, record_id, "evaluate_record()")
    said: Mapping[str, object] = record.scores
    scores = {name: _finite(record, name, value) for name, value in said.items()}
    score = _finite(record, "the score", record.score)
    for agent, reward in record.agent_rewards.items():
        _finite(record, f"the reward of agent {agent}", reward)
    return record.model_copy(update={"score": score, "scores": scores})


def _check_document(record: object, record_id: str, of: str) -> None:
    """What a user's method returned is the Record that it was given, and can be read again where it
    is stored: nothing checks what is assigned to the fields of a Record."""
    if not isinstance(record, Record):
        raise ValueError(f"{of} returned {shown(record)}, not its Record")
    if record.id != record_id:
        raise ValueError(f"{of} returned the Record {shown(record.id)}, not {record_id}")
    # Scores are looked at by `check_scored`, which takes numbers of any library.
    fields = record.model_dump(by_alias=True, exclude={"score", "scores"}, warnings=False)
    try:
        Record.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        given = shown(first["input"])
        raise ValueError(
            f"{of} returned record {record_id} with `{place}` {given}: {first['msg']}"
        ) from None


def _finite(record: Record, name: str, value: object) -> float | None:
    if value is None:
        return None
    number = float(value) if isinstance(value, SupportsFloat) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} of record {record.id} is {shown(value)}, not a finite number")
    if abs(number) > LARGEST_SCORE:
        raise ValueError(
            f"{name} of record {record.id} is {number:g}, beyond {LARGEST_SCORE:g}: scores so "
            "large cannot be compared in a group, scale them"
        )
    return number


def check_row(row: DBRecordData) -> None:
    """Check a row before it is inserted. Raises ValueError if the trainer could not use it."""
    if not math.isfinite(row.reward):
        raise ValueError(f"row {row.id}: its reward is {row.reward}")
    if row.n_train_tokens == 0:
        raise ValueError(f"row {row.id} has no token to train")
    for name, values in row.tree.columns.items():
        if values.dtype.kind != "f" or np.isfinite(values).all():
            continue
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"row {row.id}: `{name}` of token {place} is {values[place]}")
