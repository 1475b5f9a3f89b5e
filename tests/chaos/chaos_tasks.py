"""The tasks of a chaos run: lines of the demo, half of them judged over HTTP, and two broken."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broken_code import BROKEN

LINES = 16  # of the demo: with the broken ones so many groups make an epoch
BROKEN_AGENT, BROKEN_SCORER = "broken-agent", "broken-scorer"


def write_tasks(demo: Path, target: Path) -> None:
    """Write the task file."""
    lines: list[Mapping[str, Any]] = [json.loads(line) for line in demo.open()][:LINES]
    # Without a schema every text is an answer, so that scorers are asked about each.
    asked = [{k: v for k, v in line.items() if k != "answer_schema"} for line in lines]
    judged = [
        {**asked[number], "scorer": "agentcpm"} if number % 2 else line
        for number, line in enumerate(lines)
    ]
    broken = [
        {**asked[0], "id": BROKEN_AGENT, "agent_name": BROKEN},
        {**asked[1], "id": BROKEN_SCORER, "scorer": BROKEN},
    ]
    target.write_text("\n".join(json.dumps(line) for line in [*judged, *broken]))


def is_good(task_id: str) -> bool:
    """Whether nothing of the task's own is broken."""
    return task_id not in (BROKEN_AGENT, BROKEN_SCORER)
