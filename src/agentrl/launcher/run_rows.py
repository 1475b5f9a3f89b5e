"""Rows of a run, with the tokens that were sampled: those of `agentrl sft --from_run`.

A row is the Record's token tree as training sees it. Trained are the turns that were completed: a
malformed call or a truncated turn is context only, as it is never reinforced in the run itself.
Records of groups that the run left out, because all of them were right, have rows too.
`run_pairs.py` makes pairs of the same Records.
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import ArrayLike

from agentrl.configs import ConfigError
from agentrl.configs.digests import tokenizer_digest
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DispatchedSamplingTask, Split, TurnStatus
from agentrl.databases.records import RecordLedger
from agentrl.databases.token_tree import TokenTree
from agentrl.file_digest import Digest
from agentrl.launcher.database import run_database, run_place
from agentrl.launcher.record_filter import finished_records, read_conditions
from agentrl.rollout.demonstrations.prepare import (
    MadeRow,
    Preparation,
    PreparedRows,
    UnusableRows,
    keep_rows,
    refuse_longer,
)
from agentrl.rollout.groups.group_rules import turn_advantages
from agentrl.rollout.groups.row_building import replay

RIGHT = ("score>=1",)  # the conditions if none are given
FORMAT = "2"  # of the trees: a change makes all runs be prepared anew
_AT_ONCE = 32  # Records whose turns are in memory
_LEASE_S = 60.0  # unused: what is over is read without a lease

P = ParamSpec("P")
Turns = Sequence[DispatchedSamplingTask]


def demonstrations_of_run(
    where: Sequence[str],
    run: str,
    out: Path,
    preparation: Preparation,
    report: Callable[[int], None] = lambda n_rows: None,
) -> PreparedRows:
    """Make the trees of a run's Records in a folder within `out`, or find them there.

    `where`: conditions of `--where`, else `RIGHT`. `report` is called with the number of rows seen
    so far. Raises `UnusableRows` if no Record can be trained, and `ConfigError` for a run without a
    database, a condition that is none, and a model whose tokens are others than the run's.
    """
    where = where or RIGHT
    longest = preparation.longest
    with opened_run(run, preparation.model) as opened:
        ids = [record["_id"] for record in opened.records(where)]

        def made() -> Iterator[MadeRow]:
            return demonstrations(opened.turns(ids), longest)

        folder = out / f"rows-{rows_digest(FORMAT, run, str(longest), *ids)}"
        return keep_rows(folder, run, made, report)


def demonstrations(records: Iterable[tuple[str, Turns]], longest: int) -> Iterator[MadeRow]:
    """The tree of each Record. What a rollout and its forks have in common is trained once."""
    in_trees: set[str] = set()
    for record, turns in records:
        copies = {turn.id for turn in turns if in_trees & _same_turn(turn)}
        row = made_or_why(trained_tree, turns, longest, copies=copies)
        if isinstance(row, TokenTree):
            in_trees.update(*map(_same_turn, turns))
        yield MadeRow(f"record {record}", row)


class FinishedRun:
    """What a run has sampled to the end."""

    def __init__(self, database: RunDatabase, runner: asyncio.Runner) -> None:
        self._database = database
        self._runner = runner

    def records(self, where: Sequence[str]) -> list[Mapping[str, Any]]:
        """`_id`, `task` and `score` of the finished Records that match, in the order of the ids.

        Raises `UnusableRows` if there is none, and `ConfigError`.
        """
        found = self._runner.run(self._records(where))
        if not found:
            which = f" with {' and '.join(where)}" if where else ""
            name = self._database.name
            raise UnusableRows(
                f"{name}: it has no finished record{which}; `agentrl show {name} --best` lists "
                "what it has"
            )
        return found

    def turns(self, records: Sequence[str]) -> Iterator[tuple[str, Turns]]:
        """The turns of each of these Records, in their order."""
        ledger = RecordLedger(self._database, _LEASE_S)
        for start in range(0, len(records), _AT_ONCE):
            some = records[start : start + _AT_ONCE]
            turns = self._runner.run(ledger.turns(some))
            for record in some:
                yield record, turns[record]

    async def _records(self, where: Sequence[str]) -> list[Mapping[str, Any]]:
        return await finished_records(self._database, read_conditions(where), Split.TRAIN)


@contextmanager
def opened_run(run: str, model: Path) -> Iterator[FinishedRun]:
    """The database of a run, for a model that knows the run's tokens. Raises `ConfigError`."""
    place = run_place({"run_name": run})
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            opened = runner.run(stack.enter_async_context(run_database(place, run_lives=True)))
            runner.run(_refuse_other_tokens(opened.database, model))
            yield FinishedRun(opened.database, runner)
        finally:
            runner.run(stack.aclose())


async def _refuse_other_tokens(database: RunDatabase, model: Path) -> None:
    run = await database.runs.find_one({"_id": database.name}, {"digests": 1}) or {}
    of_run, ours = run.get("digests", {}).get("model_name_or_path"), tokenizer_digest(model)
    if of_run is not None and of_run != ours:
        raise ConfigError(
            f"--model {model}: its tokenizer or chat template is not that of the run's model, so "
            "that the run's tokens say other things to it; train it on a file, with --train_file"
        )


def rows_digest(*parts: str) -> str:
    """The digest of all that the trees of a run depend on."""
    digest = Digest()
    for part in parts:
        digest.part(part.encode())
    return digest.text()


def trained_tree(
    turns: Turns, longest: int, *, liked: bool = True, copies: Container[str] = ()
) -> TokenTree:
    """The tree of a Record, whose mask is 1 on what is trained.

    `liked`: whether the Record is to become more likely. Failed turns are trained only to become
    less likely. `copies`: ids of turns that another Record's tree trains, of which this one is a
    fork. Raises `ValueError` with one sentence if there is nothing to train.
    """
    if not any(turn.output_ids for turn in turns):
        raise ValueError(
            "has turns without tokens: `agentrl export-data --format messages` (or preferences) "
            "makes a file of them for --train_file"
        )
    of_turns = turn_advantages(1.0 if liked else -1.0, [TurnStatus(turn.status) for turn in turns])
    columns: list[dict[str, ArrayLike]] = [
        {"advantages": of_turn} if turn.trained and turn.id not in copies else {"mask": 0}
        for turn, of_turn in zip(turns, of_turns, strict=True)
    ]
    tree = replay(turns, columns).tree()
    refuse_longer(tree, longest)
    trained = (tree["mask"] == 1) & (tree["advantages"] != 0)
    if not trained.any():
        raise ValueError("has no completed turn to train")
    return tree.with_columns(
        mask=trained, advantages=trained, logprobs=np.zeros(len(tree)),
        versions=np.where(trained, 0, -1),
    )  # fmt: skip


def _same_turn(turn: DispatchedSamplingTask) -> set[str]:
    """The ids under which a turn is stored, in a rollout and in its forks."""
    return {turn.id} if turn.replayed is None else {turn.id, turn.replayed}


def made_or_why(make: Callable[P, TokenTree], *args: P.args, **kwargs: P.kwargs) -> TokenTree | str:
    """The tree that `make` returns, or the reason that it raises."""
    try:
        return make(*args, **kwargs)
    except ValueError as error:
        return str(error)
