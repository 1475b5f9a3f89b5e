"""Records to be scored, and scorers opened for them, shared by the scorers' tests."""

from datetime import UTC, datetime
from typing import Any

from agentrl.databases.arrays import pack_floats, pack_ints
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    Slot,
    Split,
    Task,
)
from agentrl.policy_version import VersionSpan


def make_task(scorer: str, **values: Any) -> Task:
    """A task with four slots."""
    return Task(
        _id="train-0-a", split=Split.TRAIN, epoch=0, seq=0, group_order=0, task_id="a", pending=0,
        scorer=scorer, slots=[Slot(rollout=rollout) for rollout in range(4)],
        **{"query": "?", "answer": "42", **values},
    )  # fmt: skip


def make_record(final_answer: str | None = "42", rollout: int = 0, **values: Any) -> Record:
    """A finished Record of that task."""
    return Record(
        _id=f"train-0-a-t{rollout}-a0", task="train-0-a", task_id="a", rollout=rollout, attempt=0,
        split=Split.TRAIN, epoch=0, owner="test", query="?", final_answer=final_answer, **values,
    )  # fmt: skip


def make_turn(record: Record, number: int, asked: str, said: str) -> DispatchedSamplingTask:
    """A turn of that Record, whose prompt is `asked`: two tokens of prompt, two of output."""
    return DispatchedSamplingTask(
        _id=f"{record.id}-{number}", record_id=record.id, turn=number, segment=number,
        service="http://127.0.0.1:1", messages=[{"role": "user", "content": asked}],
        prompt_delta_ids=pack_ints([1, 2 + number]), prompt_len=2, output_ids=pack_ints([4, 5]),
        output_logprobs=pack_floats([-0.5, -0.25]), output_text=said, finish_reason="stop",
        versions=[VersionSpan(version=0, start=0, end=2)], generate_latency_s=0.0,
        shared_len=min(number, 1), created_at=datetime.now(UTC),
    )  # fmt: skip
