"""Which state may follow which, as tables, and the one function per document that applies them.

Nothing else writes `status`. The filter of each atomic update names the states from which its table
allows the change. A change that does not match is refused, with the state found and the state
wanted. When and why a change is made is decided in `tasks.py` and `scorings.py` (Tasks and slots),
`records.py` (Records), `row_ledger.py` (rows) and `rescoring.py` (Records and rows that are scored
again).

A Task and its slots are one document. So their changes are expressions that one update pipeline
combines: `slots_changed` and `task_status`.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from pymongo import UpdateMany
from pymongo.asynchronous.collection import AsyncCollection

from agentrl.databases.documents import (
    Fork,
    RecordStatus,
    RowStatus,
    Slot,
    SlotStatus,
    TaskStatus,
)
from agentrl.databases.expressions import (
    Expression,
    all_of,
    any_slot,
    literal,
    next_scoring,
    slots_in,
    slots_updated,
)

Status = TypeVar("Status", bound=StrEnum)

TASK_TRANSITIONS: dict[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.CREATED: frozenset({TaskStatus.RUNNING, TaskStatus.LEFT_OUT}),
    TaskStatus.RUNNING: frozenset({TaskStatus.FINALISING}),
    TaskStatus.FINALISING: frozenset({TaskStatus.COMPLETED, TaskStatus.QUARANTINED}),
    # A release from quarantine: something is scored or finalised again.
    TaskStatus.COMPLETED: frozenset({TaskStatus.RUNNING, TaskStatus.FINALISING}),
    TaskStatus.QUARANTINED: frozenset({TaskStatus.RUNNING, TaskStatus.FINALISING}),
    TaskStatus.LEFT_OUT: frozenset(),
}
SLOT_TRANSITIONS: dict[SlotStatus, frozenset[SlotStatus]] = {
    SlotStatus.PENDING: frozenset({SlotStatus.LEASED}),
    SlotStatus.LEASED: frozenset(
        {
            SlotStatus.PENDING,
            SlotStatus.SAMPLED,
            SlotStatus.COMPLETED,
            SlotStatus.FAILED,
            SlotStatus.QUARANTINED,
        }
    ),
    SlotStatus.SAMPLED: frozenset({SlotStatus.LEASED}),
    SlotStatus.COMPLETED: frozenset(),
    SlotStatus.FAILED: frozenset(),
    SlotStatus.QUARANTINED: frozenset({SlotStatus.SAMPLED}),  # released
}
RECORD_TRANSITIONS: dict[RecordStatus, frozenset[RecordStatus]] = {
    RecordStatus.SAMPLING: frozenset({RecordStatus.SAMPLED, RecordStatus.FAILED}),
    RecordStatus.SAMPLED: frozenset(
        # failed: the slot was lost before the trajectory was stored
        {RecordStatus.SCORED, RecordStatus.QUARANTINED, RecordStatus.FAILED}
    ),
    RecordStatus.SCORED: frozenset(
        # failed: the slot was lost before the score arrived; quarantined: no row can be built
        {
            RecordStatus.READY,
            RecordStatus.ABANDONED,
            RecordStatus.FAILED,
            RecordStatus.QUARANTINED,
        }
    ),
    RecordStatus.FAILED: frozenset(),
    # Released: to be scored again, or to become a row.
    RecordStatus.QUARANTINED: frozenset({RecordStatus.SAMPLED, RecordStatus.SCORED}),
    # After `agentrl rescore`, the group's rules may decide otherwise.
    RecordStatus.READY: frozenset({RecordStatus.ABANDONED}),
    RecordStatus.ABANDONED: frozenset({RecordStatus.READY}),
}
ROW_TRANSITIONS: dict[RowStatus, frozenset[RowStatus]] = {
    RowStatus.READY: frozenset({RowStatus.LEASED, RowStatus.EVICTED, RowStatus.WITHDRAWN}),
    RowStatus.LEASED: frozenset({RowStatus.READY, RowStatus.TRAINED, RowStatus.QUARANTINED}),
    # The trainer resumed from before the step that trained or evicted the row.
    RowStatus.TRAINED: frozenset({RowStatus.READY}),
    RowStatus.EVICTED: frozenset({RowStatus.READY}),
    RowStatus.WITHDRAWN: frozenset({RowStatus.READY}),
    RowStatus.QUARANTINED: frozenset({RowStatus.READY}),  # released
}
# Groups that give no more rows, unless something is released from quarantine.
ENDED_TASKS = frozenset({TaskStatus.COMPLETED, TaskStatus.QUARANTINED, TaskStatus.LEFT_OUT})
OPEN_TASKS = sorted(set(TaskStatus) - ENDED_TASKS)  # a list of names, so that an index serves
TERMINAL_SLOTS = frozenset({SlotStatus.COMPLETED, SlotStatus.FAILED, SlotStatus.QUARANTINED})


class TransitionRefused(RuntimeError):
    """A document's state does not allow the change; nothing was changed.

    `document`: its name. `found`: its state (None: it does not exist). `wanted`: the refused state.
    """

    def __init__(self, document: str, found: str | None, wanted: str) -> None:
        state = "is not there" if found is None else f"is {found}"
        super().__init__(f"{document} {state}, so it cannot become {wanted}")
        self.document = document
        self.found = found
        self.wanted = wanted


def states_before(
    transitions: Mapping[Status, frozenset[Status]],
    to: Status,
    expected: Collection[Status] | None = None,
) -> list[Status]:
    """The states from which `transitions` allow a change to `to`, in the table's order.

    `expected`: only these; the table must allow each of them.
    """
    allowed = [state for state, following in transitions.items() if to in following]
    if expected is None:
        return allowed
    assert set(expected) <= set(allowed), f"only {allowed} may become {to}, not {set(expected)}"
    return [state for state in allowed if state in expected]


# Of one group in one update, which has a stage for each; mongod takes 1,000 stages.
SLOTS_AT_ONCE = 400


def slots_changed(
    which: Expression, to: SlotStatus, fields: Mapping[str, Expression]
) -> Expression:
    """The `slots` of a Task, with those that match `which` changed to `to`.

    `which` and `fields` refer to the slot as `$$slot`. Slots that may not become `to` stay as they
    are; the update's filter decides whether that is an error. A slot that becomes pending starts a
    new trajectory, so its scorings are reset.
    """
    unscored = {"scorings": 0, "scoring_failures": 0} if to == SlotStatus.PENDING else {}
    return slots_updated(
        all_of({"$in": ["$$slot.status", states_before(SLOT_TRANSITIONS, to)]}, which),
        {**fields, **unscored, "status": to},
    )


def slots_forked(record: str, to: SlotStatus, forks: Sequence[int]) -> Expression:
    """The `slots` of a Task, and a pending one for each fork of `record`, if its slot is `to`.

    Not if there are forks of it already: the update may be repeated. `forks`: turns.
    """
    of_record = {"$eq": ["$$slot.record", literal(record)]}
    ended = any_slot(all_of(of_record, {"$eq": ["$$slot.status", to]}))
    known = any_slot({"$eq": ["$$slot.fork.record", literal(record)]})
    added = [
        {
            "$mergeObjects": [
                literal(Slot(rollout=0, fork=Fork(record=record, turn=turn)).model_dump()),
                {"rollout": {"$add": [{"$size": "$slots"}, place]}},
            ]
        }
        for place, turn in enumerate(forks)
    ]
    may = all_of(ended, {"$not": [known]})
    return {"$cond": [may, {"$concatArrays": ["$slots", added]}, "$slots"]}


def task_status(to: TaskStatus, when: Expression = True) -> Expression:
    """The `status` of a Task that becomes `to` if `when` holds and the table allows it."""
    may = {"$in": ["$status", states_before(TASK_TRANSITIONS, to)]}
    return {"$cond": [all_of(may, when), to, "$status"]}


def group_settled(finalisation: Expression) -> list[dict[str, Expression]]:
    """Update stages that follow a change of a Task's slots.

    If all slots are terminal now, the Task becomes FINALISING with this `finalisation`.
    """
    finished = {"$eq": [slots_in(TERMINAL_SLOTS), {"$size": "$slots"}]}
    return [
        {
            "$set": {
                "pending": slots_in({SlotStatus.PENDING}),
                "score_at": next_scoring(),
                "status": task_status(TaskStatus.FINALISING, finished),
                "finalisation": {"$cond": [finished, finalisation, "$finalisation"]},
            }
        }
    ]


def record_change(
    record_id: str,
    to: RecordStatus,
    fields: Mapping[str, Any],
    *,
    expected: Collection[RecordStatus] | None = None,
) -> UpdateMany:
    """The change of one Record, for a bulk write. `fields` are values, not expressions.

    It matches no document if the table refuses the change. `expected`: only from these states.
    """
    sources = states_before(RECORD_TRANSITIONS, to, expected)
    return UpdateMany(
        {"_id": record_id, "status": {"$in": sources}}, {"$set": {**fields, "status": to}}
    )


async def change_records(
    records: AsyncCollection[dict[str, Any]],
    selection: Mapping[str, Any],
    to: RecordStatus,
    fields: Mapping[str, Any],
) -> int:
    """Change all Records of `selection` that may become `to`; returns how many were changed.

    `fields` are values. Records in other states stay as they are.
    """
    sources = states_before(RECORD_TRANSITIONS, to)
    result = await records.update_many(
        {"$and": [{"status": {"$in": sources}}, dict(selection)]},
        {"$set": {**fields, "status": to}},
    )
    return result.modified_count


async def change_rows(
    rows: AsyncCollection[dict[str, Any]],
    selection: Mapping[str, Any],
    to: RowStatus,
    fields: Mapping[str, Expression],
    *,
    expected: Collection[RowStatus] | None = None,
    index: str | None = None,
) -> int:
    """Change all rows of `selection` that may become `to`; returns how many were changed.

    `fields` are expressions over the old row (text must be a `$literal`). `expected`: only rows in
    these states. Rows in other states stay as they are. `index`: the index hint; None: the server
    chooses.
    """
    sources = states_before(ROW_TRANSITIONS, to, expected)
    result = await rows.update_many(
        {"$and": [{"status": {"$in": sources}}, dict(selection)]},
        [{"$set": {**fields, "status": to}}],
        hint=index,
    )
    return result.modified_count
