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
        pairs, alike = best_and_worst(opened.records(where), margin)
        ids = [record for pair in pairs.values() for record in pair]

        def made() -> Iterator[MadeRow]:
            yield from ((f"group {group}", why) for group, why in alike.items())
            turns = (turns for _, turns in opened.turns(ids))
            for group, best, worst in zip(pairs, turns, turns, strict=True):  # two at a time
                yield f"group {group}", made_or_why(_pair, best, worst, longest)

        folder = out / f"rows-{rows_digest(FORMAT, run, str(longest), 'pairs', *ids)}"
        return keep_rows(folder, run, made, report)


def best_and_worst(
    records: Sequence[Mapping[str, Any]], margin: float | None
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """The ids of the best and of the worst Record of each group, and why others have no pair.

    `records`: `_id`, `task` (the group) and `score`. Of equal ones the first by its id counts.
    """
    pairs: dict[str, tuple[str, str]] = {}
    alike: dict[str, str] = {}
    by_group = itemgetter("task")
    for group, members in groupby(sorted(records, key=by_group), key=by_group):
        scored = sorted(
            (one for one in members if one.get("score") is not None), key=itemgetter("_id")
        )
        if len(scored) < 2:
            alike[group] = f"has {len(scored)} finished trajectories with a score, and a pair two"
            continue
        best, worst = max(scored, key=itemgetter("score")), min(scored, key=itemgetter("score"))
        difference = best["score"] - worst["score"]
        if difference > 0 and (margin is None or difference >= margin):
            pairs[group] = (best["_id"], worst["_id"])
        else:
            least = "" if margin is None or not difference else f", less than --margin {margin:g}"
            alike[group] = f"has scores that differ by {difference:g} only{least}"
    return pairs, alike


def _pair(best: Turns, worst: Turns, longest: int) -> TokenTree:
    return pair_tree(trained_tree(best, longest), trained_tree(worst, longest, liked=False))
