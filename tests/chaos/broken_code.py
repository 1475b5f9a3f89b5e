"""Users' code that always fails, for one task each: an agent and a scorer."""

from agentrl import register_agent, register_scorer

BROKEN = "broken"


async def broken_agent(task: object, llm: object, tools: object) -> str:
    """Never answers."""
    raise KeyError("the agent of this task is broken")


async def broken_scorer(model_answer: str, ground_truth: str) -> float:
    """Never scores."""
    raise ValueError("the scorer of this task is broken")


register_agent(BROKEN, broken_agent)
register_scorer(BROKEN, broken_scorer)
