"""The page of an optimizer step: its figures, and the rows that were trained in it or left out."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from agentrl.databases.documents import RowStatus
from agentrl.launcher.progress import Metrics
from agentrl.viewer.places import Place
from agentrl.viewer.steps import read_steps
from agentrl.viewer.timeline import Timeline, read_timeline

_SHOWN = 1000
_FIELDS = (
    "task", "reward", "n_train_tokens", "n_tokens", "policy_versions", "n_segments", "n_drifts",
    "prompt_len", "cost", "status",
)  # fmt: skip


@dataclass(frozen=True)
class StepPage:
    """What the page shows. Rows are documents without their columns."""

    step: int
    figures: Metrics
    rows: list[dict[str, Any]]
    evicted: list[dict[str, Any]]
    groups: dict[str, int]  # rows by group
    records: dict[str, dict[str, Any]]  # the rows' Records, by id
    last: int  # the newest step
    timeline: Timeline | None


async def read_step_page(place: Place, step: int) -> StepPage:
    """Read it, by indexes."""
    database = place.database
    steps = await read_steps(place)
    figures = next((line for line in steps if line["step"] == step), {})
    fields = dict.fromkeys(_FIELDS, 1)
    trained = database.rows.find({"trained.step": step}, fields, hint="trained").limit(_SHOWN)
    rows = [row async for row in trained]
    old = database.rows.find(
        {"status": RowStatus.EVICTED, "step": step}, fields, hint="held"
    ).limit(_SHOWN)
    evicted = [row async for row in old]
    ids = [row["_id"] for row in (*rows, *evicted)]
    shown = {"score": 1, "advantage": 1, "task_id": 1, "n_turns": 1, "rollout": 1}
    records = {
        record["_id"]: record
        async for record in database.records.find({"_id": {"$in": ids}}, shown)
    }
    return StepPage(
        step=step,
        figures=figures,
        rows=sorted(rows, key=lambda row: row["_id"]),
        evicted=evicted,
        groups=dict(Counter(row["task"] for row in rows)),
        records=records,
        last=steps[-1]["step"] if steps else step,
        timeline=await read_timeline(place, figures),
    )
