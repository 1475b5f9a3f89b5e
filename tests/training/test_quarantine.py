"""A row that cannot be trained is quarantined, and the run goes on with the others."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from launching import on_two_processes
from tiny import VOCABULARY, linear_rows, make_row
from trainer_run import Run

from agentrl.databases.documents import DBRecordData, RowStatus
from agentrl.databases.policies import Lineage
from agentrl.databases.quarantine import Quarantined, count_quarantined, release
from agentrl.databases.row_ledger import RowLedger
from agentrl.training.data.row_checks import check_trainable
from agentrl.training.step.culprits import find_culprits
from agentrl.training.trainer import main

HUGE = 3e38  # finite in float32, and no gradient of it is
PPO = ("--loss_calculator", "PPO", "--critic_learning_rate", "1e-3")


def with_column(row: DBRecordData, **columns: Any) -> DBRecordData:
    return row.model_copy(update={"tree": row.tree.with_columns(**columns)})


def exploding(row: DBRecordData) -> DBRecordData:
    return with_column(row, advantages=HUGE)


def overrated(row: DBRecordData) -> DBRecordData:
    """One that the policy can learn from, by PPO's normalized advantages, and no critic."""
    return row.model_copy(update={"reward": HUGE})


def beyond_vocabulary(row: DBRecordData) -> DBRecordData:
    return with_column(row, ids=np.full(row.n_tokens, VOCABULARY))


# What makes a gradient of a row infinite, with which flags, and what the row's error says.
EXPLOSIONS = pytest.mark.parametrize(
    ("explode", "loss", "said"),
    [
        (exploding, (), "its gradient is not finite (step 1)"),
        (overrated, PPO, "the critic's gradient of it is not finite (step 1)"),
        (
            overrated,
            (*PPO, "--critic_warmup_steps", "2"),
            "the critic's gradient of it is not finite (step 1)",
        ),
    ],
    ids=["policy", "critic", "critic that warms up"],
)
Explode = Callable[[DBRecordData], DBRecordData]


def add_with_damage(run: Run, count: int, explode: Explode) -> None:
    """Of so many rows, number 1 explodes, 5 is damaged and 6 of another model."""
    rows = linear_rows(count)
    rows[1], rows[6] = explode(rows[1]), beyond_vocabulary(rows[6])
    run.add(rows)
    run.database(lambda db: db.rows.update_one({"_id": "row-005"}, {"$set": {"loss_mask": b""}}))


def check_run(run: Run, count: int, said: str) -> None:
    rows = {row["_id"]: row for row in run.rows()}
    errors = {name: row["error"] for name, row in rows.items() if row["status"] == "quarantined"}
    assert errors.keys() == {"row-001", "row-005", "row-006"}
    assert errors["row-001"] == said
    assert errors["row-005"].startswith("it cannot be read: ")
    assert f"the model {VOCABULARY} tokens" in errors["row-006"]
    trained = [row for row in rows.values() if row["status"] == RowStatus.TRAINED]
    assert len(trained) == count - 3
    assert all(len(row["trained"]) == 1 for row in trained)
    steps = [row["trained"][0]["step"] for row in trained]
    assert [steps.count(step) for step in sorted(set(steps))] == [3, 4, 4, count - 14]
    for line in run.metrics():
        figures = [line["loss"], line["grad_norm"], line.get("value_loss"), line.get("return_mean")]
        assert np.isfinite([figure for figure in figures if figure is not None]).all()
    assert run.database(count_quarantined) == Quarantined(rows=3)


@EXPLOSIONS
def test_rows_that_cannot_be_read_or_trained_are_quarantined_and_training_goes_on(
    run: Run, explode: Explode, loss: Sequence[str], said: str
) -> None:
    add_with_damage(run, 15, explode)
    assert main(run.flags("--enable_sampling", "false", *loss)) == 0
    check_run(run, 15, said)


@pytest.mark.slow
@EXPLOSIONS
def test_two_processes_find_the_row_that_one_of_them_has(
    run: Run, explode: Explode, loss: Sequence[str], said: str
) -> None:
    flags = run.flags("--enable_sampling", "false", *loss)
    flags[flags.index("--per_device_train_batch_size") + 1] = "2"
    add_with_damage(run, 15, explode)
    launched = on_two_processes(flags)
    assert launched.returncode == 0, launched.stderr
    check_run(run, 15, said)


@EXPLOSIONS
def test_a_run_of_which_no_gradient_is_finite_stops_with_one_sentence(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    explode: Explode,
    loss: Sequence[str],
    said: str,
) -> None:
    run.add([explode(row) for row in linear_rows(20)])
    assert main(run.flags("--enable_sampling", "false", *loss)) == 2
    told = capsys.readouterr().err
    assert "the gradients of 3 steps in a row were not finite" in told
    assert ("--critic_learning_rate" in told) == ("critic" in said)
    assert "Traceback" not in told
    assert run.rows()[0]["error"] == said
    statuses = [row["status"] for row in run.rows()]
    assert statuses.count(RowStatus.QUARANTINED) == 12
    assert statuses.count(RowStatus.TRAINED) == 0


async def test_a_released_row_is_trained_and_one_that_a_successor_holds_stays_its_own(
    database: Any,
) -> None:
    await database.rows.insert_many([row.to_mongo() for row in linear_rows(3)])
    lineage = Lineage({0: 0})
    first, second = RowLedger(database, "a", fence=1), RowLedger(database, "b", fence=2)
    leased = [row.id for row in await first.lease(1, 3, lineage, 9)]
    assert await first.quarantine(1, {leased[0]: "$no good"}) == 1
    assert await second.rewind(0) == 2
    assert [row.id for row in await second.lease(1, 3, lineage, 9)] == leased[1:]
    assert await first.quarantine(1, {leased[1]: "mine no more"}) == 0
    assert await second.commit(1, leased[1:]) == 2
    row = DBRecordData.from_mongo(await database.rows.find_one({"_id": leased[0]}))
    assert (row.status, row.error, row.trainer) == (RowStatus.QUARANTINED, "$no good", None)
    assert await release(database, ["nothing"]) == Quarantined()
    assert await release(database, leased) == Quarantined(rows=1)
    assert [row.id for row in await second.lease(2, 3, lineage, 9)] == leased[:1]


@pytest.mark.parametrize("wrong", [(), (0,), (6,), (2, 3), (0, 4, 6), tuple(range(7))])
def test_the_search_finds_each_row_that_is_wrong_alone(wrong: tuple[int, ...]) -> None:
    passes: list[Sequence[int]] = []

    def is_finite(rows: Sequence[int]) -> bool:
        passes.append(rows)
        return not set(rows) & set(wrong)

    assert find_culprits(is_finite, range(7)) == list(wrong)
    assert len(passes) <= 2 * 7


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"ids": np.full(9, -1)}, "token 0 has the id -1"),
        ({"logprobs": float("nan")}, "`logprobs` of token 0 is nan"),
        ({"mask": 0}, "no token to train"),
    ],
)
def test_what_no_step_can_compute_with_is_told(columns: dict[str, Any], said: str) -> None:
    row = make_row("a", 0, [(0, 9, -1)])
    check_trainable(row, VOCABULARY)
    with pytest.raises(ValueError, match=said):
        check_trainable(with_column(row, **columns), VOCABULARY)
