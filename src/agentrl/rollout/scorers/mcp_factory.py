"""`MCPScorerFactory.register_scorer`, the name under which scorers are registered since the first
version. Scorers themselves are in `rollout/scorers`."""

import inspect
from typing import Any

from agentrl.rollout.scorers.functions import ScorerFunction
from agentrl.rollout.scorers.scorer_registry import register_scorer

_OF_THE_FIRST_VERSION = 3  # parameters of a scorer that it calls


class MCPScorerFactory:
    """Registers scorers under the name of the first version."""

    @staticmethod
    def register_scorer(name: str, function: ScorerFunction) -> None:
        """Register a function as the scorer `name`.

        `function`: `async fn(model_answer: str, ground_truth: str) -> float`, or another one that
        `rollout/scorers/functions.py` allows; or `async fn(model_answer: str, ground_truth: dict,
        scorer_agent_config: dict) -> float`, which gets the task's `query` and `answer`, and what
        the agent file has under `scorer_agent`.
        """
        taken = [*inspect.signature(function).parameters] if callable(function) else []
        if len(taken) != _OF_THE_FIRST_VERSION or "scorer_agent_config" not in taken:
            register_scorer(name, function)
            return

        async def scorer(
            model_answer: str, ground_truth: str, question: str, scorer_agent_config: Any
        ) -> Any:
            truth = {"query": question, "answer": ground_truth}
            return await function(model_answer, truth, scorer_agent_config)

        register_scorer(name, scorer)
