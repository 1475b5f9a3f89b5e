"""Credit of turns by forks: the advantages of a group some of whose rollouts are forked. Pure.

A fork of rollout p at turn t has p's turns before t, and its own from t on. So the group is a tree:
its rollouts branch at the prompt, and at each fork turn the forks branch off the rollout's own
continuation. The value of a state is estimated from what follows it (VinePPO, arXiv 2410.01679, by
Monte Carlo; the tree's own branches are the samples):

    Q(branch) = V(the next fork turn on it), or its score if there is none
    V(state)  = mean of Q over the branches at it

and all turns from one state to the next on a branch have the advantage of that branch among its
siblings, by the run's estimator:

    mean             A = Q - V
    leave_one_out    A = B / (B - 1) * (Q - V), B branches
    mean_std         A = (Q - V) / (std + 1e-4), std of the scores of the whole group

With `mean`, the advantages along a rollout sum to its score less the value of the prompt. Without
forks they are the estimator's own.
"""

from collections.abc import Sequence

from agentrl.configs import ConfigError
from agentrl.configs.combinations import FORK_ESTIMATORS
from agentrl.databases.documents import Record, Stretch
from agentrl.rollout.groups.advantages import leave_one_out, mean, score_of, spread


def fork_advantages(records: Sequence[Record], estimator: str) -> list[list[Stretch]]:
    """The stretches of turns of each scored Record [n] of a group, with their advantages.

    A fork has one, from the turn at which it branches off. Raises `ConfigError` for another
    estimator, as of a run that goes on without `--fork_turns`.
    """
    if estimator not in FORK_ESTIMATORS:
        raise ConfigError(
            f"--advantage {estimator}: rollouts of this run are forked, and the values of forked "
            f"turns need {', '.join(FORK_ESTIMATORS[:-1])} or {FORK_ESTIMATORS[-1]}; give one of "
            "these"
        )
    advantages: list[list[Stretch]] = [[] for _ in records]
    place = {record.id: index for index, record in enumerate(records)}
    forks: dict[str, dict[int, list[int]]] = {}  # by parent and turn: places of its forks
    for index, record in enumerate(records):
        if record.fork is not None:
            of_parent = forks.setdefault(record.fork.record, {})
            of_parent.setdefault(record.fork.turn, []).append(index)
    compare = leave_one_out if estimator == "leave_one_out" else mean
    scale = spread([score_of(record) for record in records]) if estimator == "mean_std" else 1.0

    def branch(places: Sequence[int], turn: int, values: Sequence[float]) -> None:
        for index, advantage in zip(places, compare(values), strict=True):
            advantages[index].insert(0, Stretch(turn=turn, advantage=advantage / scale))

    roots = [index for index, record in enumerate(records) if record.fork is None]
    values = {index: score_of(records[index]) for index in roots}
    for parent, by_turn in forks.items():
        # A parent that was quarantined is no branch; its forks are.
        own = [place[parent]] if parent in place else []
        for turn in sorted(by_turn, reverse=True):
            siblings = [*own, *by_turn[turn]]
            found = [values.get(index, score_of(records[index])) for index in siblings]
            branch(siblings, turn, found)
            for index in own:
                values[index] = sum(found) / len(found)
    branch(roots, 0, [values[index] for index in roots])
    return advantages


def of_turns(stretches: Sequence[Stretch], n_turns: int) -> list[float]:
    """The advantage of each turn; 0 before the first stretch."""
    advantages = [0.0] * n_turns
    for stretch in stretches:
        advantages[stretch.turn :] = [stretch.advantage] * (n_turns - stretch.turn)
    return advantages
