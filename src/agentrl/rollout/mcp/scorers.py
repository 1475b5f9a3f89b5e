"""Scorers: from a model's answer and the right one to a score between 0 and 1.

    exact_match   the same text, but for case and white space
    math          the same mathematical value (math-verify), in a process of its own
    agentcpm      a judging model says that they agree (`judge.py`)

Others are registered by name. A scorer that raises leaves its error on the Record; no score is made
up in its place.
"""

import inspect
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import ClassVar, Self

from agentrl.rollout.helping_models import HelpingModels
from agentrl.rollout.mcp.agent_config import AgentConfig
from agentrl.rollout.mcp.judge import Judge
from agentrl.rollout.mcp.math_verifier import MathVerifier

ScorerFunction = Callable[..., Awaitable[float]]
"""`async fn(model_answer: str, ground_truth: str) -> float`"""


async def exact_match(model_answer: str, ground_truth: str) -> float:
    """1.0 if both are the same text, but for case and white space."""
    return float(_normalised(model_answer) == _normalised(ground_truth))


def _normalised(text: str) -> str:
    return " ".join(text.split()).casefold()


class MCPScorerFactory:
    """All scorers of a process. Entered once: it owns the judge's connections, math's process."""

    _registered: ClassVar[dict[str, ScorerFunction]] = {"exact_match": exact_match}
    _built_in: ClassVar[frozenset[str]] = frozenset({"exact_match", "math", "agentcpm"})

    def __init__(self, agents: AgentConfig) -> None:
        self._judging_models = HelpingModels(agents.scorer_agent)
        self._judge = Judge(self._judging_models)
        self._math = MathVerifier()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._judging_models)
        await self._stack.enter_async_context(self._math)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @classmethod
    def register_scorer(cls, name: str, function: ScorerFunction) -> None:
        """Make `function` the scorer `name` of task lines.

        `function`: `async fn(model_answer: str, ground_truth: str) -> float`. Raises ValueError if
        the name is taken by a built-in scorer or the function is not a coroutine function with
        these parameters.
        """
        if name in cls._built_in:
            raise ValueError(f"scorer {name!r} is built in; register yours under another name")
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"scorer {name!r} must be an async function")
        try:
            inspect.signature(function).bind(model_answer="", ground_truth="")
        except TypeError as error:
            raise ValueError(
                f"scorer {name!r} must take `model_answer` and `ground_truth`: {error}"
            ) from None
        cls._registered[name] = function

    @classmethod
    def known(cls) -> frozenset[str]:
        """The names that a task line's `scorer` may have."""
        return cls._built_in | cls._registered.keys()

    async def score(
        self, name: str, *, question: str, model_answer: str, ground_truth: str | None
    ) -> float:
        """Score an answer. Raises what the scorer raises, and ValueError for an unknown name, a
        task without `answer`, or a score that is not a finite number."""
        if name not in self.known():
            raise ValueError(f"unknown scorer {name!r}; known: {', '.join(sorted(self.known()))}")
        if ground_truth is None:
            raise ValueError(f"the task has no `answer`, which scorer {name!r} compares with")
        if name == "agentcpm":
            score = await self._judge.score(question, model_answer, ground_truth)
        elif name == "math":
            score = await self._math.score(model_answer, ground_truth)
        else:
            function = self._registered[name]
            score = await function(model_answer=model_answer, ground_truth=ground_truth)
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(f"scorer {name!r} returned {score!r}, which is not a finite number")
        return float(score)
