"""MongoDB aggregation expressions over a Task and its slots: pure values, no I/O.

A slot is `$$slot` in every expression about one.
"""

from collections.abc import Collection, Mapping
from typing import Any

from agentrl.databases.documents import SlotStatus
from agentrl.databases.storable import brief

Expression = Any  # a MongoDB aggregation expression

EXPIRED: Expression = {  # the slot's lease has expired, by the server's clock
    "$and": [
        {"$eq": ["$$slot.status", SlotStatus.LEASED]},
        {"$lt": ["$$slot.lease_expires", "$$NOW"]},
    ]
}
SLOT_RECORD: Expression = {  # the id of the Record of the slot's next attempt
    "$concat": [
        "$_id", "-t", {"$toString": "$$slot.rollout"}, "-a", {"$toString": "$$slot.attempt"},
    ]
}  # fmt: skip


def literal(value: object) -> Expression:
    """A value that MongoDB must not evaluate, such as text that begins with `$`."""
    return {"$literal": value}


def told(error: str) -> Expression:
    """An error as a Task stores it: shortened and storable in MongoDB."""
    return literal(brief(error))


def all_of(*conditions: Expression) -> Expression:
    """Whether all conditions hold."""
    return {"$and": list(conditions)}


def in_milliseconds(milliseconds: int) -> Expression:
    """`milliseconds` after the server's current time."""
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
    """Update stages that set each slot's score; `scores`: by Record id."""
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
    """The number of slots in one of these states."""
    return {"$size": slots_where({"$in": ["$$slot.status", sorted(statuses)]})}


def next_scoring() -> Expression:
    """The earliest `not_before` of the slots that wait for scoring; null if none waits."""
    waiting = slots_where({"$eq": ["$$slot.status", SlotStatus.SAMPLED]})
    return {"$min": {"$map": {"input": waiting, "as": "slot", "in": "$$slot.not_before"}}}


def first_to_score() -> Expression:
    """The rollout number of the first slot that is due at the Task's `score_at`."""
    due = {"$eq": ["$$slot.not_before", "$score_at"]}
    waiting = slots_where(all_of({"$eq": ["$$slot.status", SlotStatus.SAMPLED]}, due))
    return {"$first": {"$map": {"input": waiting, "as": "slot", "in": "$$slot.rollout"}}}


def first_pending(count: int) -> Expression:
    """The rollout numbers of the first `count` pending slots."""
    pending = slots_where({"$eq": ["$$slot.status", SlotStatus.PENDING]})
    return {"$slice": [{"$map": {"input": pending, "as": "slot", "in": "$$slot.rollout"}}, count]}
