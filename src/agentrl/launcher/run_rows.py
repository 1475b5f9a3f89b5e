"""Rows of `agentrl sft --from_run`: a run's trajectories, with the tokens that were sampled.

A row is the Record's token tree as training sees it. Trained are the turns that were completed: a
malformed call or a truncated turn is context only, as it is never reinforced in the run itself.
Records of groups that the run left out, because all of them were right, have rows too.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from agentrl.configs import ConfigError
from agentrl.configs.digests import tokenizer_digest
from agentrl.databases.connection import BEFORE_ALL, RunDatabase
from agentrl.databases.documents import DispatchedSamplingTask, RecordStatus, Split, TurnStatus
from agentrl.databases.records import RecordLedger
from agentrl.databases.token_tree import TokenTree
from agentrl.file_digest import Digest
from agentrl.launcher.database import run_database, run_place
from agentrl.launcher.record_filter import (
    Filter,
    names_field,
    read_conditions,
    refused_by_mongod,
    selected,
)
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
_FORMAT = "1"  # of the trees: a change makes all runs be prepared anew
_AT_ONCE = 32  # Records whose turns are in memory
_LEASE_S = 60.0  # unused: what is over is read without a lease


def rows_of_run(
    run: str,
    where: Sequence[str],
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
    conditions = read_conditions(where)
    place = run_place({"run_name": run})
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            opened = runner.run(stack.enter_async_context(run_database(place, run_lives=True)))
            runner.run(_refuse_other_tokens(opened.database, preparation.model))
            ids = runner.run(_records(opened.database, conditions))
            if not ids:
                raise UnusableRows(
                    f"{run}: it has no finished record with {' and '.join(where)}; `agentrl show "
                    f"{run} --best` lists what it has"
                )
            ledger = RecordLedger(opened.database, _LEASE_S)

            def made() -> Iterator[MadeRow]:
                for start in range(0, len(ids), _AT_ONCE):
                    some = ids[start : start + _AT_ONCE]
                    turns = runner.run(ledger.turns(some))
                    for record in some:
                        yield f"record {record}", _tree(turns[record], preparation.longest)

            folder = out / f"rows-{_digest(run, ids, preparation.longest)}"
            return keep_rows(folder, run, made, report)
        finally:
            runner.run(stack.aclose())


async def _refuse_other_tokens(database: RunDatabase, model: Path) -> None:
    run = await database.runs.find_one({"_id": database.name}, {"digests": 1}) or {}
    of_run, ours = run.get("digests", {}).get("model_name_or_path"), tokenizer_digest(model)
    if of_run is not None and of_run != ours:
        raise ConfigError(
            f"--model {model}: its tokenizer or chat template is not that of the run's model, so "
            "that the run's tokens say other things to it; train it on conversations, with "
            "--train_file"
        )


async def _records(database: RunDatabase, conditions: Filter) -> list[str]:
    """Ids of the finished Records that match, in the order of the ids."""
    filters = await selected(database, conditions, Split.TRAIN)
    filters += [{"finished_at": {"$gt": BEFORE_ALL}}, {"n_turns": {"$gt": 0}}]
    if not names_field(conditions, "status"):
        filters.append({"status": {"$nin": [RecordStatus.FAILED, RecordStatus.QUARANTINED]}})
    with refused_by_mongod():
        found = database.records.find({"$and": filters}, {"_id": 1}).sort("_id", 1)
        return [document["_id"] async for document in found]


def _digest(run: str, ids: Sequence[str], longest: int) -> str:
    digest = Digest()
    for part in (_FORMAT, run, str(longest), *ids):
        digest.part(part.encode())
    return digest.text()


def _tree(turns: Sequence[DispatchedSamplingTask], longest: int) -> TokenTree | str:
    """The tree of a Record, whose mask is 1 on what is trained; or why it has none."""
    of_turns = turn_advantages(1.0, [TurnStatus(turn.status) for turn in turns])
    try:
        tree = replay(turns, [{"advantages": of_turn} for of_turn in of_turns]).tree()
        refuse_longer(tree, longest)
    except ValueError as error:
        return str(error)
    trained = (tree["mask"] == 1) & (tree["advantages"] > 0)
    if not trained.any():
        return "has no completed turn to train"
    return tree.with_columns(
        mask=trained, advantages=trained, logprobs=np.zeros(len(tree)),
        versions=np.where(trained, 0, -1),
    )  # fmt: skip
