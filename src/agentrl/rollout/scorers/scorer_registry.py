"""Which scorers there are, by the names that a task's `scorer` may hold.

    built in        see `BUILT_IN`
    registered      `register_scorer`, called by the file of `--scorer_module`
    installed       entry points of the group `agentrl.scorers`

This is the order of precedence. `functions.py` defines inputs and results of scorers.
"""

import re
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from agentrl.configs import Config, ConfigError
from agentrl.configs.user_module import load_user_module
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.foreign_text import text_of
from agentrl.rollout.llm.models import AgentModels
from agentrl.rollout.scorers.compared_texts import contains, exact_match, f1
from agentrl.rollout.scorers.functions import Scorer, ScorerFunction
from agentrl.rollout.scorers.judge import Judge
from agentrl.rollout.scorers.math_verifier import MathVerifier
from agentrl.rollout.scorers.reward_service import RewardService
from agentrl.rollout.scorers.ruler import Ruler

GROUP = "agentrl.scorers"
_PLAIN_NUMBER = re.compile(r"-?\d{1,100}(\.\d{1,100})?")  # most answers; needs no parser
JUDGE_NAMES = ("agentcpm", "asearcher")  # the second is another name for it in the original
_registered: dict[str, Scorer] = {}


def _unbound(name: str, method: ScorerFunction) -> Scorer:
    """The scorer of a method without its object; only its inputs are known."""
    return Scorer.of(name, method.__get__(object()))


BUILT_IN: dict[str, Scorer] = {
    "exact_match": Scorer.of("exact_match", exact_match),
    "contains": Scorer.of("contains", contains),
    "f1": Scorer.of("f1", f1),
    "math": _unbound("math", MathVerifier.score),
    **{name: _unbound(name, Judge.score) for name in JUDGE_NAMES},
    "http": _unbound("http", RewardService.score),
    "ruler": _unbound("ruler", Ruler.score_group),
}
"""`Scorers` binds those that are methods to their objects."""


def register_scorer(name: str, function: ScorerFunction) -> None:
    """Register `function` as the scorer `name`.

    Raises ValueError if the name is built in or not allowed in a sum of scorers, or if the function
    requires unknown inputs (`functions.py`).
    """
    if name in BUILT_IN:
        raise ValueError(f"scorer {name!r} is built in; register yours under another name")
    if parse_scorer(name) != {name: 1.0}:
        raise ValueError(f"scorer {name!r}: a name must be without `*`, `+` and white space")
    _registered[name] = Scorer.of(name, function)


def load_scorers(config: Config) -> None:
    """Load `--scorer_module`, which registers its scorers. Raises `ConfigError`."""
    if config.reward.scorer_module is not None:
        load_user_module(config.reward.scorer_module, "scorer_module")


def known_scorers() -> frozenset[str]:
    """The names of all scorers."""
    return frozenset(BUILT_IN.keys() | _registered.keys() | _installed(tuple(sys.path)).keys())


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """The entry points of packages in `path`. Cached, because reading them is slow."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def find_scorer(name: str) -> Scorer:
    """The scorer of a name.

    Raises ValueError if it is unknown, and `ConfigError` if its package is unusable.
    """
    scorer = BUILT_IN.get(name) or _registered.get(name)
    if scorer is not None:
        return scorer
    entry = _installed(tuple(sys.path)).get(name)
    if entry is None:
        raise ValueError(
            f"unknown scorer {name!r}; known: {', '.join(sorted(known_scorers()))} "
            "(--scorer_module FILE registers more)"
        )
    try:
        scorer = _registered[name] = Scorer.of(name, entry.load())
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"scorer {name!r} of entry point {entry.value} cannot be used: {text_of(error)}"
        ) from error
    return scorer


def unfit_answer(scorer: str, answer: str) -> str | None:
    """Why no model answer could ever equal a task's `answer`; None if one could.

    `scorer`: the task's, one name or a sum.
    """
    if "math" not in parse_scorer(scorer) or _PLAIN_NUMBER.fullmatch(answer):
        return None
    # Imported here: its libraries take a second to load.
    from agentrl.mathematics.equality import is_readable

    if is_readable(answer):
        return None
    return (
        f"`answer` {answer[:80]!r} is no mathematics, which scorer math compares with: mend it, or "
        "give another scorer"
    )


def missing_for(name: str, agents: AgentModels) -> str | None:
    """What a scorer needs and the agent config lacks; None if nothing."""
    if name in JUDGE_NAMES and not agents.scorer_agent:
        return "asks a model: name one under `scorer_agent`"
    if name == "ruler" and not agents.ranking_models:
        return "asks a model: name one under `ruler_agent` or `scorer_agent`"
    if name == "http" and agents.http_scorer is None:
        return "asks a service: give its url under `http_scorer`"
    return None
