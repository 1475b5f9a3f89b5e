"""What must be true of a run's documents when it is over, whatever befell it.

Pure functions from documents as MongoDB holds them to sentences, one for each thing that is wrong.
The run ended because all its tasks were sampled and all rows trained, evicted or quarantined, so
nothing may be left half done.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from chaos_tasks import BROKEN_AGENT, BROKEN_SCORER

from agentrl.databases.arrays import unpack_ints, unpack_mask

Document = Mapping[str, Any]

_COUNTED = frozenset(
    {"scored", "ready", "abandoned"}
)  # states of Records that stand for their slot


@dataclass(frozen=True)
class RunState:
    """All documents of a run's training, by collection."""

    run: Document
    tasks: Sequence[Document]
    records: Sequence[Document]
    turns: Sequence[Document]
    rows: Sequence[Document]
    policy_versions: Sequence[Document]


def violations(state: RunState, max_staleness: int, rows_per_step: int) -> list[str]:
    """Everything that is wrong; empty for a run that lost, doubled and delayed nothing."""
    return [
        *_unfinished(state),
        *slot_violations(state.tasks, state.records),
        *row_violations(state.records, state.rows),
        *token_violations(state.records, state.turns, state.rows),
        *quarantine_violations(state.records, state.rows),
        *training_violations(state.run, state.rows, rows_per_step),
        *staleness_violations(state.rows, state.policy_versions, max_staleness),
    ]


def _unfinished(state: RunState) -> Iterator[str]:
    if state.run["status"] != "finished":
        yield f"the run is {state.run['status']}, not finished"
    if not state.tasks:
        yield "the run has no tasks"


def slot_violations(tasks: Sequence[Document], records: Sequence[Document]) -> Iterator[str]:
    """Every slot is terminal, by exactly one Record; every other Record says why it ended."""
    by_slot: defaultdict[tuple[str, int], list[Document]] = defaultdict(list)
    for record in records:
        by_slot[record["task"], record["rollout"]].append(record)
    for task in tasks:
        if task["status"] not in ("completed", "quarantined"):
            yield f"task {task['_id']} is {task['status']}, not completed"
        if task["status"] == "quarantined" and not task["error"]:
            yield f"task {task['_id']} is quarantined without an error"
        if task["pending"] != sum(slot["status"] == "pending" for slot in task["slots"]):
            yield f"task {task['_id']} counts {task['pending']} pending slots, it has others"
        for slot in task["slots"]:
            attempts = by_slot.pop((task["_id"], slot["rollout"]), [])
            yield from _slot(f"slot {slot['rollout']} of {task['_id']}", slot, attempts)
    for task_id, rollout in by_slot:
        yield f"records of slot {rollout} of {task_id}, which does not exist"


def _slot(name: str, slot: Document, attempts: Sequence[Document]) -> Iterator[str]:
    if slot["status"] not in ("completed", "failed", "quarantined"):
        yield f"{name} is {slot['status']}, not terminal"
    if slot["owner"] is not None:
        yield f"{name} is {slot['status']} and still held by {slot['owner']}"
    counted = [record for record in attempts if record["status"] in _COUNTED]
    wanted = 1 if slot["status"] == "completed" else 0
    if len(counted) != wanted:
        names = [f"{record['_id']} ({record['status']})" for record in counted]
        yield f"{name} is {slot['status']} and has {len(counted)} results: {names}"
    elif counted and counted[0]["_id"] != slot["record"]:
        yield f"{name} names record {slot['record']}, its result is {counted[0]['_id']}"
    elif counted and counted[0]["score"] != slot["score"]:
        yield f"{name} has score {slot['score']}, its record {counted[0]['score']}"
    if slot["status"] in ("failed", "quarantined") and not slot["error"]:
        yield f"{name} is {slot['status']} without an error"
    for record in attempts:
        if record["status"] in ("sampling", "sampled"):
            yield f"record {record['_id']} is left as {record['status']}"
        if record["status"] in ("failed", "quarantined") and not record["error"]:
            yield f"record {record['_id']} is {record['status']} without an error"


def task_violations(tasks: Sequence[Document], records: Sequence[Document]) -> Iterator[str]:
    """What is broken is told apart from what is not: a rollout whose agent raises fails, one whose
    scorer raises is in quarantine with its trajectory, and no other task loses a rollout."""
    by_id = {record["_id"]: record for record in records}
    ends = {BROKEN_AGENT: "failed", BROKEN_SCORER: "quarantined"}
    for task in tasks:
        wanted = ends.get(task["task_id"], "completed")
        for slot in task["slots"]:
            name = f"slot {slot['rollout']} of {task['_id']} ({task['task_id']})"
            record = by_id.get(slot["record"])
            # Where there is no answer no scorer is asked.
            if wanted == "quarantined" and record and record["final_answer"] is None:
                continue
            if slot["status"] != wanted:
                yield f"{name} is {slot['status']}, not {wanted}: {slot['error']}"
            elif wanted == "quarantined" and (record is None or record["status"] != wanted):
                yield f"{name} is in quarantine without its trajectory"


def row_violations(records: Sequence[Document], rows: Sequence[Document]) -> Iterator[str]:
    """Every ready Record became one row, and nothing else did."""
    counts = Counter(row["_id"] for row in rows)
    ready = {record["_id"] for record in records if record["status"] == "ready"}
    for record in records:
        if record["status"] == "scored":
            yield f"record {record['_id']} was scored and its group never finalised it"
    for row in sorted(ready - counts.keys()):
        yield f"record {row} is ready and has no row"
    for row in sorted(counts.keys() - ready):
        yield f"row {row} has no ready record"
    for row, count in counts.items():
        if count > 1:
            yield f"row {row} is there {count} times"


def token_violations(
    records: Sequence[Document], turns: Sequence[Document], rows: Sequence[Document]
) -> Iterator[str]:
    """A row's tokens are those of its Record's turns: none lost, none twice, in order."""
    by_record: defaultdict[str, list[Document]] = defaultdict(list)
    for turn in turns:
        by_record[turn["record_id"]].append(turn)
    n_turns = {record["_id"]: record["n_turns"] for record in records}
    for row in rows:
        own = sorted(by_record[row["_id"]], key=lambda turn: turn["turn"])
        if [turn["turn"] for turn in own] != list(range(n_turns.get(row["_id"], -1))):
            yield f"row {row['_id']} has turns {[turn['turn'] for turn in own]}"
            continue
        ids: list[int] = []
        for turn in own:
            ids += unpack_ints(turn["prompt_delta_ids"]).tolist()
            ids += unpack_ints(turn["output_ids"]).tolist()
        if unpack_ints(row["input_ids"]).tolist() != ids:
            yield f"row {row['_id']} holds other tokens than its record's turns"


def quarantine_violations(records: Sequence[Document], rows: Sequence[Document]) -> Iterator[str]:
    """A row in quarantine says why, nobody holds it, and its Record is sound; no other has an
    error.

    The Record stays ready: it is the row that cannot be trained, with the Record's reward.
    """
    by_id = {record["_id"]: record for record in records}
    for row in rows:
        name = f"row {row['_id']}"
        if row["status"] != "quarantined":
            if row["error"] is not None:
                yield f"{name} is {row['status']} and has an error: {row['error']}"
            continue
        if not row["error"]:
            yield f"{name} is quarantined without an error"
        if row["trainer"] is not None or row["step"] is not None:
            yield f"{name} is quarantined and held by {row['trainer']} for step {row['step']}"
        record = by_id.get(row["_id"])
        if record is None:
            continue  # which `row_violations` says
        if record["task"] != row["task"]:
            yield f"{name} is quarantined as of {row['task']}, its record is of {record['task']}"
        if record["score"] != row["reward"]:
            yield f"{name} is quarantined with reward {row['reward']}, not {record['score']}"
        if record["error"] is not None:
            yield f"{name} is quarantined, and its record too has an error: {record['error']}"


def training_violations(
    run: Document, rows: Sequence[Document], rows_per_step: int
) -> Iterator[str]:
    """Every row is trained once, or evicted, or quarantined; every step but the last has all its
    rows, save those whose gradient of this step was not finite."""
    steps: Counter[int] = Counter()
    left_out: Counter[int] = Counter()
    for row in rows:
        times = len(row["trained"])
        if (row["status"], times) not in (("trained", 1), ("evicted", 0), ("quarantined", 0)):
            yield f"row {row['_id']} is {row['status']} and trained {times} times"
        steps.update(entry["step"] for entry in row["trained"])
        of_step = re.search(r"is not finite \(step (\d+)\)$", row["error"] or "")
        if row["status"] == "quarantined" and of_step:
            left_out[int(of_step[1])] += 1
    last = run["step"]
    for step in sorted({*steps, *range(1, last + 1)}):
        if not 1 <= step <= last:
            yield f"{steps[step]} rows were trained in step {step} of a run of {last}"
            continue
        fewest = rows_per_step - left_out[step] if step < last else 0
        if not fewest <= steps[step] <= rows_per_step:
            yield f"step {step} trained {steps[step]} rows, not {rows_per_step}"


def staleness_violations(
    rows: Sequence[Document], policy_versions: Sequence[Document], max_staleness: int
) -> Iterator[str]:
    """No trained token is from a policy more than `max_staleness` steps before its step."""
    for row_id, age in token_ages(rows, policy_versions).items():
        if age is None:
            yield f"row {row_id} was trained with tokens of a version that was never published"
        elif age > max_staleness:
            yield f"row {row_id} was trained with tokens {age} steps old"


def token_ages(
    rows: Sequence[Document], policy_versions: Sequence[Document]
) -> dict[str, int | None]:
    """For each trained row, how many steps its oldest token lags; None for an unknown version.

    Step s trains the weights that s - 1 steps made. A version of a step that was undone by a
    resume is newer than that, and not old.
    """
    step_of = {policy["version"]: policy["step"] for policy in policy_versions}
    ages: dict[str, int | None] = {}
    for row in rows:
        mask = unpack_mask(row["loss_mask"]).astype(bool)
        versions = np.unique(unpack_ints(row["versions"])[mask]).tolist()
        for entry in row["trained"]:
            steps = [step_of.get(version) for version in versions]
            known = [step for step in steps if step is not None]
            unknown = len(known) < len(steps)
            ages[row["_id"]] = None if unknown else max(0, entry["step"] - 1 - min(known))
    return ages
