"""Which tasks are not to be claimed, by what their lines name: agents and scorers."""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """The tasks with one of these agents or scorers, or `everything`.

    `agents`: names as in the tasks; None stands for tasks that name no agent.
    """

    agents: frozenset[str | None] = frozenset()
    scorers: frozenset[str] = frozenset()
    everything: bool = False

    def __or__(self, other: "TaskChoice") -> "TaskChoice":
        return TaskChoice(
            self.agents | other.agents,
            self.scorers | other.scorers,
            self.everything or other.everything,
        )

    def others(self) -> dict[str, Any]:
        """The MongoDB filter for all other tasks."""
        assert not self.everything, "no task is left"
        query: dict[str, Any] = {}
        if self.agents:
            query["agent_name"] = {"$nin": sorted(self.agents, key=str)}
        if self.scorers:
            # `scorer` may be a weighted sum of names: `scorer_notation.py`.
            names = "|".join(re.escape(name) for name in sorted(self.scorers))
            query["scorer"] = {"$not": {"$regex": rf"(^|[\s+*])({names})($|[\s+*])"}}
        return query


NO_TASKS = TaskChoice()
ALL_TASKS = TaskChoice(everything=True)
