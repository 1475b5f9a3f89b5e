"""Records to be scored, and scorers opened for them, shared by the scorers' tests."""

from typing import Any

from agentrl.databases.documents import Record, Slot, Split, Task


def make_task(scorer: str, **values: Any) -> Task:
    """A task with four slots."""
    return Task(
        _id="train-0-a", split=Split.TRAIN, epoch=0, seq=0, place=0, task_id="a", pending=0,
        scorer=scorer, slots=[Slot(traj=traj) for traj in range(4)],
        **{"query": "?", "answer": "42", **values},
    )  # fmt: skip


def make_record(final_answer: str | None = "42", traj: int = 0, **values: Any) -> Record:
    """A finished Record of that task."""
    return Record(
        _id=f"train-0-a-t{traj}-a0", task="train-0-a", task_id="a", traj=traj, attempt=0,
        split=Split.TRAIN, epoch=0, owner="test", query="?", final_answer=final_answer, **values,
    )  # fmt: skip
