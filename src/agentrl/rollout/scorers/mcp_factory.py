"""`MCPScorerFactory.register_scorer`, the name under which scorers are registered since the first
version. Scorers themselves are in `rollout/scorers`."""

from agentrl.rollout.scorers.functions import ScorerFunction
from agentrl.rollout.scorers.scorer_registry import register_scorer


class MCPScorerFactory:
    """Where scorers are registered: see `register_scorer`."""

    @staticmethod
    def register_scorer(name: str, function: ScorerFunction) -> None:
        """Make `async fn(model_answer: str, ground_truth: str) -> float` the scorer `name`, or any
        other function that `rollout/scorers/functions.py` allows."""
        register_scorer(name, function)
