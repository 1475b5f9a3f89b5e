"""The page of a Record: its conversation, its tokens, and why it was trained or not."""

import shlex
from dataclasses import dataclass
from typing import Any

from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Note,
    Record,
    RecordStatus,
    RowStatus,
    Split,
    Task,
    TaskStatus,
)
from agentrl.databases.notes import read_note
from agentrl.launcher.trajectory import read_turns
from agentrl.launcher.trajectory_tokens import model_folder, read_row
from agentrl.viewer.places import Place

PROGRAM = "program"  # the agent that is a program of the user's
# Why a finalised Record became no row, by its `left_out`; a rule of another name names itself.
_LEFT_OUT = {
    "drop_zero_advantage": "its advantage is 0, as when all rollouts of the group have the same "
    "score (--drop_zero_advantage)",
    "minimal_advantage": "its advantage is below --minimal_advantage",
    "balance_sample": "others of the group were chosen, so that right and wrong ones are as many "
    "(--balance_sample)",
    "balance_equally": "others of the group were chosen, so that right and wrong ones are as many "
    "(--balance_equally)",
    "greedy_baseline": "it is the greedy rollout that the others are compared with",
    "min_score_spread": "the scores of its group differ too little (--min_score_spread)",
    "reserve_context_error_count": "enough others of the group ended at a limit "
    "(--reserve_context_error_count)",
    "min_turns": "it has fewer turns than --min_turns",
    "not_scored": "it has no score",
    "quarantined": "no row could be made of it",
    "no_turns": "nothing was generated: its prompt was at a limit",
    "not_trained": "none of its turns is to be trained: they are of agents that are not trained, "
    "or were sampled otherwise",
    "too_long": "all its turns end beyond --max_tokens",
}


@dataclass(frozen=True)
class TrajectoryPage:
    """What the page shows. `siblings`: the Records of the group, by rollout, last attempts first.

    `fate`: one sentence on whether it was trained, and why not. `steps`: those that trained it.
    `made_at`: the optimizer step of the weights that began it. `model`: folder of its tokenizer.
    """

    record: Record
    task: Task | None
    turns: list[DispatchedSamplingTask]
    row: DBRecordData | None
    fate: str
    steps: list[int]
    made_at: int | None
    siblings: list[dict[str, Any]]
    note: Note | None
    model: str | None
    show: str  # the command that shows it in a terminal
    replay: str | None  # the one that runs its program again


async def read_trajectory_page(place: Place, record_id: str) -> TrajectoryPage | None:
    """Read it; None if there is no such Record."""
    database = place.database
    document = await database.records.find_one({"_id": record_id})
    if document is None:
        return None
    record = Record.from_mongo(document)
    task = await database.tasks.find_one({"_id": record.task})
    row = await read_row(database, record_id)
    shown = {"rollout": 1, "attempt": 1, "score": 1, "status": 1, "stop_reason": 1}
    siblings = database.records.find({"task": record.task}, shown)
    # The weights of an evaluation are another run's, or no run's.
    version = record.versions.min if record.versions and record.epoch >= 0 else None
    made = await database.policy_versions.find_one({"version": version}) if version else None
    model = await model_folder(database)
    return TrajectoryPage(
        record=record,
        task=None if task is None else Task.from_mongo(task),
        turns=await read_turns(database, record.id),
        row=row,
        fate=_fate(record, row, None if task is None else TaskStatus(task["status"])),
        steps=[each.step for each in row.trained] if row else [],
        made_at=made["step"] if made else (0 if version == 0 else None),
        siblings=[each async for each in siblings.sort([("rollout", 1), ("attempt", -1)])],
        note=await read_note(database, record_id),
        model=None if model is None else str(model),
        show=shlex.join(["agentrl", "show", place.name, record.id]),
        replay=_replay_command(place, record),
    )


def _replay_command(place: Place, record: Record) -> str | None:
    """Programs are run again, answered from the ledger; agents of AgentRL's are not."""
    if record.agent_name != PROGRAM:
        return None
    return shlex.join(["agentrl", "replay", place.name, record.id])


def _fate(record: Record, row: DBRecordData | None, group: TaskStatus | None) -> str:
    """Whether it is trained, and why not."""
    if row is None:
        match record.status:
            case RecordStatus.SAMPLING:
                return "It is being sampled."
            case RecordStatus.SAMPLED:
                return "Its conversation is over; it waits for its score."
            case RecordStatus.SCORED if record.split == Split.EVAL:
                return "It has its score, and is not trained: it is of an evaluation."
            case RecordStatus.SCORED if group != TaskStatus.RUNNING:
                return "It has its score; its group is being finished."
            case RecordStatus.SCORED:
                return "It has its score; the group waits for its other rollouts."
            case RecordStatus.FAILED:
                return "Not trained: the attempt failed. Its rollout is tried again, or given up."
            case RecordStatus.QUARANTINED:
                return f"Not trained: it is in quarantine ({record.error})."
        if record.left_out is None:
            return "Not trained: it is of an evaluation."
        return f"Not trained: {_LEFT_OUT.get(record.left_out, record.left_out)}."
    match row.status:
        case RowStatus.TRAINED:
            steps = ", ".join(str(each.step) for each in row.trained)
            return f"Trained in step {steps}: {row.n_train_tokens} tokens."
        case RowStatus.EVICTED:
            return "Not trained: older than --max_staleness when its turn came."
        case RowStatus.QUARANTINED:
            return f"Not trained: the row is in quarantine ({row.error})."
        case RowStatus.WITHDRAWN:
            return "Not trained: left out after its group was scored again."
        case RowStatus.LEASED:
            return f"A trainer holds it for step {row.step}."
    return "Ready: it waits for a trainer."
