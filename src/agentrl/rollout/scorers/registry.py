"""Which scorers there are, by name.

Built-in ones keep their names; others are registered with `register_scorer`.
"""

import inspect
from collections.abc import Awaitable, Callable

ScorerFunction = Callable[..., Awaitable[float]]
"""`async fn(model_answer: str, ground_truth: str) -> float`"""

BUILT_IN = frozenset({"exact_match", "math", "agentcpm"})
_registered: dict[str, ScorerFunction] = {}


def register_scorer(name: str, function: ScorerFunction) -> None:
    """Make `function` the scorer `name` of task lines.

    `function`: `async fn(model_answer: str, ground_truth: str) -> float`. Raises ValueError if
    the name is taken by a built-in scorer or the function is not a coroutine function with
    these parameters.
    """
    if name in BUILT_IN:
        raise ValueError(f"scorer {name!r} is built in; register yours under another name")
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"scorer {name!r} must be an async function")
    try:
        inspect.signature(function).bind(model_answer="", ground_truth="")
    except TypeError as error:
        raise ValueError(
            f"scorer {name!r} must take `model_answer` and `ground_truth`: {error}"
        ) from None
    _registered[name] = function


def known_scorers() -> frozenset[str]:
    """The names that a task line's `scorer` may have."""
    return BUILT_IN | _registered.keys()


def registered(name: str) -> ScorerFunction:
    """The function registered under a name."""
    return _registered[name]
