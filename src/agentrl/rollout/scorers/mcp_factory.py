"""`MCPScorerFactory.register_scorer`, the name under which scorers are registered since the first
version. Scorers themselves are in `rollout/scorers`."""

from agentrl.rollout.scorers.functions import ScorerFunction
from agentrl.rollout.scorers.scorer_registry import register_scorer


class MCPScorerFactory:
    """Registers scorers under the name of the first version."""

    @staticmethod
    def register_scorer(name: str, function: ScorerFunction) -> None:
        """Register `async fn(model_answer: str, ground_truth: str) -> float`, or another function
        that `rollout/scorers/functions.py` allows, as the scorer `name`."""
        register_scorer(name, function)
