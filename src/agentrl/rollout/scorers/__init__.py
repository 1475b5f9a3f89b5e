"""Scorers: from what Records came to, to numbers.

    functions        what a scorer is: a function of answer, Record, conversation or whole group
    registry         which there are, by name: built in, registered, of a file or a package
    results          what they return, and weighted sums of it
    scorers          the scorers of a process, opened
    compared_texts   `exact_match`, `contains`, `f1`
    math_verifier    `math`: the same mathematical value, found out in a process of its own
    judge            `agentcpm`: a model says whether an answer agrees with the right one
    ruler            `ruler`: a model ranks the rollouts of a group against each other
    reward_service   `http`: a service of the user's own

What the scores of a group make of its Records is in `rollout/groups/group_rules.py`.
"""

from agentrl.rollout.scorers.results import Score
from agentrl.rollout.scorers.scorer_registry import known_scorers, register_scorer
from agentrl.rollout.scorers.scorers import Scorers

__all__ = ["Score", "Scorers", "known_scorers", "register_scorer"]
