"""The rewards that a program reports, checked before anything of them is kept.

What passes can be compared in a group, trained with and stored: an attempt that is over cannot be
told that its reward was none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.databases.documents import Record
from agentrl.foreign_text import shown, text_of
from agentrl.gateway.agents_of_program import NAME_RULE, is_name
from agentrl.gateway.exchange import BadRequest, finite
from agentrl.rollout.groups.boundary import LARGEST_SCORE

REWARD = "reward"  # key of the attempt's reward in its Record's `scores`
_MOST_NAMES = 1000
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class Reported:
    """What is told at once. `scores`, `agent_rewards`, `explanations`: as in a Record."""

    scores: dict[str, float] = field(default_factory=dict)
    agent_rewards: dict[str, float] = field(default_factory=dict)
    explanations: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, reward: object, explanation: object, agent: object, further: Mapping[str, Any]
    ) -> "Reported":
        """The reward of the attempt or of an agent, if it is not None, and further ones by name.

        Raises `BadRequest` for what is no reward, and for what is no name.
        """
        if agent is not None and not (isinstance(agent, str) and is_name(agent)):
            raise BadRequest(f"agent: {NAME_RULE}, got {shown(agent)}")
        told = cls()
        for name, value in further.items():
            told.scores[_checked_name(name)] = _checked(value, f"rewards.{name}")
        if reward is not None and agent is None:
            told.scores[REWARD] = _checked(reward, "reward")
        elif reward is not None and agent is not None:
            told.agent_rewards[agent] = _checked(reward, "reward")
        if explanation:
            told.explanations[REWARD if agent is None else f"{REWARD} of {agent}"] = text_of(
                explanation
            )
        return told

    def is_in(self, record: Record) -> bool:
        """Whether the record has all of it already: the same was told before."""
        return (
            self.scores.items() <= record.scores.items()
            and self.agent_rewards.items() <= record.agent_rewards.items()
            and self.explanations.items() <= record.explanations.items()
        )

    def put_in(self, record: Record) -> None:
        """Keep it in the record. Raises `BadRequest`, and keeps nothing, if there are too many."""
        scores = {**record.scores, **self.scores}
        agent_rewards = {**record.agent_rewards, **self.agent_rewards}
        explanations = {**record.explanations, **self.explanations}
        most = max(len(scores), len(agent_rewards), len(explanations))
        if most > _MOST_NAMES:
            raise BadRequest(
                f"rewards: an attempt has {_MOST_NAMES} names of them at the most, and this makes "
                f"{most}; leave some out"
            )
        record.scores, record.agent_rewards = scores, agent_rewards
        record.explanations = explanations


def _checked_name(name: str) -> str:
    if name == REWARD:
        raise BadRequest(
            'rewards.reward: that is the name of the attempt\'s own; give it as "reward", beside '
            '"rewards"'
        )
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise BadRequest(
            f"rewards: a name has 1 to {_LONGEST_NAME} printable characters, got {shown(name)}"
        )
    return name


def _checked(value: object, name: str) -> float:
    number = finite(value, name)
    if abs(number) > LARGEST_SCORE:
        raise BadRequest(
            f"{name} is {number:g}, beyond {LARGEST_SCORE:g}: rewards so large cannot be compared "
            "in a group, scale them"
        )
    return number
