"""Rows of `agentrl dpo --from_run`: of each group of a run, its best trajectory against its worst.

Both have the tokens that were sampled. Of the best one the completed turns are trained, of the
worst one all turns: a malformed call is something to unlearn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from agentrl.databases.pair_tree import pair_tree
from agentrl.databases.token_tree import TokenTree
from agentrl.launcher.group_pair import best_and_worst
from agentrl.launcher.run_rows import (
    FORMAT,
    Turns,
    made_or_why,
    opened_run,
    rows_digest,
    trained_tree,
)
from agentrl.rollout.demonstrations.prepare import (
    MadeRow,
    Preparation,
    PreparedRows,
    keep_rows,
)


def pairs_of_run(
    where: Sequence[str],
    margin: float | None,
    run: str,
    out: Path,
    preparation: Preparation,
    report: Callable[[int], None] = lambda n_rows: None,
) -> PreparedRows:
    """Make the pairs of a run's groups in a folder within `out`, or find them there.

    `where`: conditions of `--where` on the Records. `margin`: smallest difference of score, None
    for any above 0. `report` is called with the number of groups seen so far. Raises `UnusableRows`
    if no group gives a pair, and `ConfigError` as `demonstrations_of_run` does.
    """
    longest = preparation.longest
    with opened_run(run, preparation.model) as opened:
        pairs, alike = pairs_of_groups(opened.records(where), margin)
        ids = [record for pair in pairs.values() for record in pair]

        def made() -> Iterator[MadeRow]:
            yield from (MadeRow(f"group {group}", why) for group, why in alike.items())
            turns = (turns for _, turns in opened.turns(ids))
            for group, best, worst in zip(pairs, turns, turns, strict=True):  # two at a time
                yield MadeRow(f"group {group}", made_or_why(_pair, best, worst, longest))

        folder = out / f"rows-{rows_digest(FORMAT, run, str(longest), 'pairs', *ids)}"
        return keep_rows(folder, run, made, report)


def pairs_of_groups(
    records: Sequence[Mapping[str, Any]], margin: float | None
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """The ids of the best and of the worst Record of each group, and why others have no pair.

    `records`: `_id`, `task` (the group) and `score`.
    """
    pairs: dict[str, tuple[str, str]] = {}
    alike: dict[str, str] = {}
    by_group = itemgetter("task")
    for group, members in groupby(sorted(records, key=by_group), key=by_group):
        scores = {one["_id"]: one["score"] for one in members if one.get("score") is not None}
        if len(scores) < 2:
            alike[group] = f"has {len(scores)} finished trajectories with a score, and a pair two"
            continue
        pair = best_and_worst(scores)
        if pair is None:
            alike[group] = "has equal scores only"
            continue
        difference = scores[pair[0]] - scores[pair[1]]
        if margin is not None and difference < margin:
            alike[group] = (
                f"has scores that differ by {difference:g}, less than --margin {margin:g}"
            )
        else:
            pairs[group] = pair
    return pairs, alike


def _pair(best: Turns, worst: Turns, longest: int) -> TokenTree:
    return pair_tree(trained_tree(best, longest), trained_tree(worst, longest, liked=False))
