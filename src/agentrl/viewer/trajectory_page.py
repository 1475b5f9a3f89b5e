"""The page of a Record: its conversation, its tokens, and why it was trained or not."""

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
from agentrl.launcher.trajectory import read_turns
from agentrl.launcher.trajectory_tokens import model_folder, read_row
from agentrl.viewer.notes import read_note
from agentrl.viewer.places import Place


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
        turns=await read_turns(database, record),
        row=row,
        fate=_fate(record, row, None if task is None else TaskStatus(task["status"])),
        steps=[each.step for each in row.trained] if row else [],
        made_at=made["step"] if made else (0 if version == 0 else None),
        siblings=[each async for each in siblings.sort([("rollout", 1), ("attempt", -1)])],
        note=await read_note(database, record_id),
        model=None if model is None else str(model),
    )


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
        return f"Not trained: {record.left_out or 'it is of an evaluation'}."
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
