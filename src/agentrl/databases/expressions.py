"""MongoDB aggregation expressions over a Task and its slots: pure values, no I/O.

A slot is `$$slot` in every expression about one.
"""

from collections.abc import Collection, Mapping
from typing import Any

from agentrl.databases.documents import SlotStatus
from agentrl.databases.storable import brief

Expression = Any  # a MongoDB aggregation expression

EXPIRED: Expression = {  # the slot's lease has run out, on the server's clock
    "$and": [
        {"$eq": ["$$slot.status", SlotStatus.LEASED]},
        {"$lt": ["$$slot.lease_expires", "$$NOW"]},
    ]
}
SLOT_RECORD: Expression = {  # the id of the Record that the slot's next attempt makes
    "$concat": [
        "$_id", "-t", {"$toString": "$$slot.rollout"}, "-a", {"$toString": "$$slot.attempt"},
    ]
}  # fmt: skip


def literal(value: object) -> Expression:
    """A value that must not be read as an expression, as text that begins with `$` would be."""
    return {"$literal": value}


def told(error: str) -> Expression:
    """An error as a Task keeps it: cut, and as MongoDB can store it."""
    return literal(brief(error))


def all_of(*conditions: Expression) -> Expression:
    """Whether all conditions hold."""
    return {"$and": list(conditions)}


def in_milliseconds(milliseconds: int) -> Expression:
    """So long after the server's present time."""
    return {"$add": ["$$NOW", milliseconds]}


def any_slot(which: Expression) -> Expression:
    """Whether `which` holds for a slot of the Task."""
    return {"$anyElementTrue": {"$map": {"input": "$slots", "as": "slot", "in": which}}}


def slots_where(which: Expression) -> Expression:
    """The slots that `which` holds for."""
    return {"$filter": {"input": "$slots", "as": "slot", "cond": which}}


def slots_updated(which: Expression, fields: Mapping[str, Expression]) -> Expression:
    """All slots, with `fields` merged into those that `which` holds for."""
    merged = {"$mergeObjects": ["$$slot", fields]}
    return {"$map": {"input": "$slots", "as": "slot", "in": {"$cond": [which, merged, "$$slot"]}}}


def slots_scored(scores: Mapping[str, float | None]) -> list[dict[str, Expression]]:
    """The stages of an update that give completed slots the scores of their Records, by id."""
    return [
        {
            "$set": {
                "slots": slots_updated(
                    {"$eq": ["$$slot.record", literal(record)]}, {"score": literal(score)}
                )
            }
        }
        for record, score in scores.items()
    ]


def slots_in(statuses: Collection[SlotStatus]) -> Expression:
    """How many slots are in one of these states."""
    return {"$size": slots_where({"$in": ["$$slot.status", sorted(statuses)]})}


def next_scoring() -> Expression:
    """When the first of the slots that wait for their scoring may be scored; null if none waits."""
    waiting = slots_where({"$eq": ["$$slot.status", SlotStatus.SAMPLED]})
    return {"$min": {"$map": {"input": waiting, "as": "slot", "in": "$$slot.not_before"}}}


def first_to_score() -> Expression:
    """The rollout number of the slot that the Task's `score_at` is of."""
    due = {"$eq": ["$$slot.not_before", "$score_at"]}
    waiting = slots_where(all_of({"$eq": ["$$slot.status", SlotStatus.SAMPLED]}, due))
    return {"$first": {"$map": {"input": waiting, "as": "slot", "in": "$$slot.rollout"}}}


def first_pending(count: int) -> Expression:
    """The rollout numbers of the first `count` slots that nobody holds."""
    pending = slots_where({"$eq": ["$$slot.status", SlotStatus.PENDING]})
    return {"$slice": [{"$map": {"input": pending, "as": "slot", "in": "$$slot.rollout"}}, count]}
