"""Which tasks are not to be claimed, by what their lines name: agents and scorers."""

import re
from collections.abc import Collection
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

    def includes(self, agent: str | None, scorers: Collection[str]) -> bool:
        """Whether it includes the tasks of this agent that these scorers score."""
        return self.everything or agent in self.agents or not self.scorers.isdisjoint(scorers)

    def unscored(self) -> dict[str, Any]:
        """The MongoDB filter for tasks that none of these scorers scores."""
        if not self.scorers:
            return {}
        # `scorer` may be a weighted sum of names: `scorer_notation.py`.
        names = "|".join(re.escape(name) for name in sorted(self.scorers))
        return {"scorer": {"$not": {"$regex": rf"(^|[\s+*])({names})($|[\s+*])"}}}


NO_TASKS = TaskChoice()
ALL_TASKS = TaskChoice(everything=True)
