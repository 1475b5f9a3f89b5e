"""Scorers: from what a record came to, to a number.

    registry        which scorers there are, by name: built in, registered, of a file or a package
    scorers         the scorers of a process, opened: they score records
    judge           `agentcpm`: a model says whether an answer agrees with the right one
    math_verifier   `math`: the same mathematical value, found out in a process of its own

What the scores of a group make of its records is in `rollout/rewarding.py`.
"""

from agentrl.rollout.scorers.registry import known_scorers, register_scorer
from agentrl.rollout.scorers.scorers import Scorers

__all__ = ["Scorers", "known_scorers", "register_scorer"]
