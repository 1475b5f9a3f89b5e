"""The scorers of a process, opened: from a finished Record to its score.

    exact_match   the same text, but for case and white space
    math          the same mathematical value (math-verify), in a process of its own
    agentcpm      a judging model says that they agree (`judge.py`)

A scorer that raises leaves its error on the Record; no score is made up in its place.
"""

import math
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from agentrl.configs import Config
from agentrl.databases.documents import Record, Task
from agentrl.databases.records import RecordLedger
from agentrl.rollout.mcp.agent_config import AgentConfig, load_agent_config
from agentrl.rollout.scorers.judge import Judge
from agentrl.rollout.scorers.math_verifier import MathVerifier
from agentrl.rollout.scorers.registry import known_scorers, registered


def exact_match(model_answer: str, ground_truth: str) -> float:
    """1.0 if both are the same text, but for case and white space."""
    return float(_normalised(model_answer) == _normalised(ground_truth))


def _normalised(text: str) -> str:
    return " ".join(text.split()).casefold()


class Scorers:
    """All scorers of a process. Entered once: it owns the judge's connections, math's process."""

    def __init__(self, agents: AgentConfig, records: RecordLedger) -> None:
        self._records = records
        self._judge = Judge(agents.scorer_agent)
        self._math = MathVerifier()
        self._stack = AsyncExitStack()

    @classmethod
    def of_run(cls, config: Config, records: RecordLedger) -> Self:
        """The scorers that a run's flags ask for, to be entered. Raises `AgentConfigError`."""
        return cls(load_agent_config(config.agent.agent_config_path), records)

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._judge)
        await self._stack.enter_async_context(self._math)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def score(self, task: Task, record: Record) -> Record:
        """The Record with `score` and `scores` by its task's scorer; no answer in the asked form
        scores 0. Raises what the scorer raises, and ValueError for an unknown scorer, a task
        without `answer`, or a score that is not a finite number."""
        score = 0.0
        if record.final_answer is not None:
            score = await self._score(task, record.final_answer)
        return record.model_copy(
            update={"score": score, "scores": {**record.scores, task.scorer: score}}
        )

    async def _score(self, task: Task, model_answer: str) -> float:
        name, ground_truth = task.scorer, task.answer
        if name not in known_scorers():
            raise ValueError(
                f"unknown scorer {name!r}; known: {', '.join(sorted(known_scorers()))}"
            )
        if ground_truth is None:
            raise ValueError(f"the task has no `answer`, which scorer {name!r} compares with")
        if name == "agentcpm":
            score = await self._judge.score(task.query, model_answer, ground_truth)
        elif name == "math":
            score = await self._math.score(model_answer, ground_truth)
        elif name == "exact_match":
            score = exact_match(model_answer, ground_truth)
        else:
            score = await registered(name)(model_answer=model_answer, ground_truth=ground_truth)
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(f"scorer {name!r} returned {score!r}, which is not a finite number")
        return float(score)
