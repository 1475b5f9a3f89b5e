"""Which rows a supervised step has."""

from collections import Counter

from agentrl.training.supervised.order import RowOrder


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    order = RowOrder(10, seed=1)
    rows = [row for step in range(1, 11) for row in order.step(step, 3)]
    assert [Counter(rows[at : at + 10]) for at in (0, 10, 20)] == [Counter(range(10))] * 3
    assert rows[:10] != rows[10:20]
    assert rows != [row for step in range(1, 11) for row in RowOrder(10, seed=2).step(step, 3)]


def test_a_step_has_its_rows_whichever_steps_were_asked_before() -> None:
    whole = RowOrder(7, seed=3)
    steps = [whole.step(step, 4) for step in range(1, 9)]
    assert RowOrder(7, seed=3).step(8, 4) == steps[7]
    assert whole.step(2, 4) == steps[1]
