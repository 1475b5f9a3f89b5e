"""The verifier finds nothing wrong with a sound run, and each thing that can be wrong with one."""

from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from throughput import Window, good_rollouts_per_s
from verify import RunState, task_violations, token_ages, violations

from agentrl.databases.arrays import pack_ints, pack_mask

ROWS_PER_STEP = 2
Change = Callable[[RunState], None]
NOT_FINITE = "its gradient is not finite (step 1)"
QUARANTINED = {"status": "quarantined", "trained": [], "error": NOT_FINITE}


def record(task: str, rollout: int, attempt: int, status: str, **fields: Any) -> dict[str, Any]:
    return {
        "_id": f"{task}-t{rollout}-a{attempt}", "task": task, "rollout": rollout,
        "attempt": attempt,
        "status": status, "score": 1.0, "n_turns": 2, "error": None, **fields,
    }  # fmt: skip


def row(record_id: str, step: int, version: int) -> dict[str, Any]:
    """Two turns: prompt 1 2, output 3; tool result 4, output 5."""
    return {
        "_id": record_id, "status": "trained", "trained": [{"step": step, "trainer": "t"}],
        "input_ids": pack_ints(np.array([1, 2, 3, 4, 5])),
        "loss_mask": pack_mask(np.array([0, 0, 1, 0, 1])),
        "versions": pack_ints(np.array([-1, -1, version, -1, version])),
        "task": record_id.partition("-")[0], "reward": 1.0, "trainer": None, "step": None,
        "error": None,
    }  # fmt: skip


def turns(record_id: str) -> list[dict[str, Any]]:
    return [
        {
            "_id": f"{record_id}-{turn}", "record_id": record_id, "turn": turn,
            "prompt_delta_ids": pack_ints(np.array(delta)), "output_ids": pack_ints(np.array(out)),
        }
        for turn, (delta, out) in enumerate([([1, 2], [3]), ([4], [5])])
    ]  # fmt: skip


def sound_run() -> RunState:
    """Two groups of two; one slot needed two attempts, one failed; one group's row was evicted."""
    slots = [
        {"rollout": rollout, "status": "completed", "owner": None, "score": 1.0, "error": None,
         "record": f"g{group}-t{rollout}-a{attempt}"}
        for group, rollout, attempt in [(0, 0, 0), (0, 1, 1), (1, 0, 0)]
    ]  # fmt: skip
    slots.append({**slots[0], "rollout": 1, "status": "failed", "record": None, "error": "no luck"})
    tasks = [
        {"_id": f"g{group}", "status": "completed", "pending": 0, "slots": slots[2 * group :][:2]}
        for group in range(2)
    ]
    records = [
        record("g0", 0, 0, "ready"),
        record("g0", 1, 0, "failed", error="its sampler went silent"),
        record("g0", 1, 1, "ready"),
        record("g1", 0, 0, "ready"),
        record("g1", 1, 2, "failed", error="no luck"),
    ]
    rows = [row("g0-t0-a0", 1, 0), row("g0-t1-a1", 1, 0), row("g1-t0-a0", 2, 1)]
    return RunState(
        run={"_id": "run", "status": "finished", "step": 2},
        tasks=tasks,
        records=records,
        turns=[turn for r in rows for turn in turns(r["_id"])],
        rows=rows,
        policy_versions=[{"version": 0, "step": 0}, {"version": 1, "step": 1}],
    )


def test_a_sound_run_has_no_violations() -> None:
    assert violations(sound_run(), 2, ROWS_PER_STEP) == []


@pytest.mark.parametrize("rows", [(0,), (0, 1)])
def test_nor_has_one_whose_steps_went_on_without_rows_in_quarantine(rows: tuple[int, ...]) -> None:
    state = sound_run()
    for row in rows:
        edit("rows", row, **QUARANTINED)(state)
    assert violations(state, 2, ROWS_PER_STEP) == []


def edit(collection: str, index: int, **fields: Any) -> Change:
    """A change of some document's fields."""
    return lambda state: getattr(state, collection)[index].update(fields)


def remove(collection: str, index: int) -> Change:
    return lambda state: getattr(state, collection).pop(index)


def double(collection: str, index: int, **fields: Any) -> Change:
    def change(state: RunState) -> None:
        documents = getattr(state, collection)
        documents.append({**documents[index], **fields})

    return change


def slot(task: int, rollout: int, **fields: Any) -> Change:
    return lambda state: state.tasks[task]["slots"][rollout].update(fields)


def quarantined_with_its_record(state: RunState) -> None:
    edit("rows", 0, **QUARANTINED)(state)
    edit("records", 0, error="why")(state)


def unfinished(state: RunState) -> None:
    state.run["status"] = "training"  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (unfinished, "the run is training, not finished"),
        (lambda state: state.tasks.clear(), "the run has no tasks"),
        (edit("tasks", 0, status="running"), "task g0 is running"),
        (edit("tasks", 0, pending=1), "task g0 counts 1 pending"),
        (slot(0, 0, status="leased", owner="s"), "slot 0 of g0 is leased, not terminal"),
        (slot(0, 0, owner="s"), "still held by s"),
        (slot(0, 0, record="other"), "names record other"),
        (slot(0, 0, score=0.0), "has score 0.0"),
        (slot(1, 1, error=None), "slot 1 of g1 is failed without an error"),
        (slot(1, 1, status="completed"), "has 0 results"),
        (edit("records", 1, status="scored"), "slot 1 of g0 is completed and has 2 results"),
        (edit("records", 1, status="sampling"), "left as sampling"),
        (edit("records", 1, error=None), "is failed without an error"),
        (double("records", 0, _id="x", task="g9"), "slot 0 of g9, which does not exist"),
        (edit("records", 0, status="scored"), "its group never finalised it"),
        (remove("records", 0), "has 0 results"),
        (remove("rows", 0), "record g0-t0-a0 is ready and has no row"),
        (double("rows", 0, _id="x"), "row x has no ready record"),
        (double("rows", 2), "row g1-t0-a0 is there 2 times"),
        (remove("turns", 1), "has turns [0]"),
        (double("turns", 1), "has turns [0, 1, 1]"),
        (edit("turns", 1, output_ids=pack_ints(np.array([6]))), "holds other tokens"),
        (edit("rows", 0, status="ready", trained=[]), "is ready and trained 0 times"),
        (edit("rows", 0, status="leased"), "is leased and trained 1 times"),
        (
            edit("rows", 0, trained=[{"step": 1, "trainer": "t"}] * 2),
            "row g0-t0-a0 is trained and trained 2 times",
        ),
        (edit("rows", 0, status="evicted", trained=[]), "step 1 trained 1 rows, not 2"),
        (edit("rows", 0, trained=[{"step": 3, "trainer": "t"}]), "in step 3 of a run of 2"),
        (edit("rows", 0, trained=[{"step": 2, "trainer": "t"}]), "step 1 trained 1 rows"),
        (edit("rows", 0, **QUARANTINED, trainer="t", step=1), "and held by t for step 1"),
        (edit("rows", 0, **{**QUARANTINED, "error": None}), "is quarantined without an error"),
        (
            edit("rows", 0, **{**QUARANTINED, "trained": [{"step": 1, "trainer": "t"}]}),
            "is quarantined and trained 1 times",
        ),
        (edit("rows", 0, error="why"), "row g0-t0-a0 is trained and has an error: why"),
        (
            edit("rows", 0, **{**QUARANTINED, "error": "it cannot be read: why"}),
            "step 1 trained 1 rows, not 2",
        ),
        (
            edit("rows", 0, **{**QUARANTINED, "error": NOT_FINITE.replace("1", "2")}),
            "step 1 trained 1 rows, not 2",
        ),
        (edit("rows", 0, **QUARANTINED, task="g1"), "as of g1, its record is of g0"),
        (edit("rows", 0, **QUARANTINED, reward=0.0), "with reward 0.0, not 1.0"),
        (quarantined_with_its_record, "and its record too has an error: why"),
        (remove("policy_versions", 0), "a version that was never published"),
    ],
)
def test_what_is_wrong_is_named(change: Change, sentence: str) -> None:
    state = deepcopy(sound_run())
    change(state)
    assert any(sentence in found for found in violations(state, 2, ROWS_PER_STEP))


def test_the_age_of_a_token_is_counted_in_steps_of_the_lineage() -> None:
    published = [{"version": 0, "step": 0}, {"version": 1, "step": 4}, {"version": 2, "step": 2}]
    # step 5 trains weights of 4 steps; version 1 is of a lineage that a resume left behind
    rows = [row("old", 5, 0), row("new", 5, 1), row("undone", 3, 1), row("resumed", 5, 2)]
    assert token_ages(rows, published) == {"old": 4, "new": 0, "undone": 0, "resumed": 2}
    state = RunState({"status": "finished", "step": 5}, [], [], [], rows, published)
    late = [v for v in violations(state, 2, ROWS_PER_STEP) if "steps old" in v]
    assert late == ["row old was trained with tokens 4 steps old"]


def task(task_id: str, status: str, record: str | None = None) -> dict[str, Any]:
    slot = {"rollout": 0, "status": status, "record": record, "error": "why"}
    return {"_id": f"train-0-{task_id}", "task_id": task_id, "slots": [slot]}


KEPT = [
    {"_id": "kept", "status": "quarantined", "final_answer": "7"},
    {"_id": "silent", "status": "ready", "final_answer": None},
    {"_id": "scored", "status": "ready", "final_answer": "7"},
]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (task("broken-agent", "failed"), None),
        (task("broken-agent", "completed"), "is completed, not failed"),
        (task("broken-scorer", "quarantined", "kept"), None),
        (task("broken-scorer", "completed", "silent"), None),
        (task("broken-scorer", "completed", "scored"), "is completed, not quarantined"),
        (task("broken-scorer", "quarantined", "scored"), "without its trajectory"),
        (task("train-0001", "completed", "scored"), None),
        (task("train-0001", "failed"), "is failed, not completed: why"),
        (task("train-0001", "quarantined", "kept"), "is quarantined, not completed"),
    ],
)
def test_only_what_is_broken_fails(found: dict[str, Any], sentence: str | None) -> None:
    said = list(task_violations([found], KEPT))
    assert (sentence is None) == (not said)
    assert sentence is None or sentence in said[0]


def test_the_throughput_counts_what_good_tasks_got_done() -> None:
    began = datetime(2026, 11, 22, tzinfo=UTC)
    ends = [("train-1", 1, 0.0), ("train-1", 9, 1.0), ("train-1", 11, 1.0), ("train-1", 2, None),
            ("broken-scorer", 3, 1.0)]  # fmt: skip
    records = [
        {"task_id": name, "score": score, "finished_at": began + timedelta(seconds=at)}
        for name, at, score in ends
    ]
    window = Window(began, began + timedelta(seconds=10))
    assert good_rollouts_per_s(records, [window]) == 0.2
