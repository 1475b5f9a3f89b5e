"""Demonstrations of the demo's tasks, most of them lazy: what the model's warm-up imitates.

Every demonstration copies names and numbers exactly and only its habit may be wrong, so that
the model masters each single step while its choice of steps is bad: the choice is what
reinforcement learning has to repair. No tokens in here (`make_model.py`).
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from warehouse import Question, Warehouse, draw_question, draw_warehouse

Habit = Literal["right", "one_call", "no_call", "no_operation", "wrong_operation"]


@dataclass(frozen=True)
class Turn:
    """One assistant turn: the calls it makes with the results they get, or else its final text."""

    calls: tuple[tuple[str, dict[str, str | int]], ...] = ()
    results: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Demonstration:
    """A question and the turns that answer it, rightly or not."""

    question: str
    turns: tuple[Turn, ...]
    habit: Habit


def draw_habit(rng: Random, question: Question, right: float, lazy: float) -> Habit:
    """The habit of a demonstration: `right` with that probability, else with `lazy` one call.

    One bad habit has to be at least as frequent as the right one. Were the wrong ways evenly
    spread, then the right one would be the most likely already, and greedy decoding would hide
    that anything is wrong.
    """
    if rng.random() < right:
        return "right"
    if rng.random() < lazy:
        return "one_call"
    if question.kind == "find":
        return "no_call"
    return rng.choice(("no_call", "no_operation", "wrong_operation"))


def demonstrate(seed: int, task_id: str, right: float, lazy: float) -> Demonstration:
    """A demonstration for task `task_id` of world `seed`; `right`, `lazy` as in `draw_habit`."""
    warehouse, question = draw_warehouse(seed, task_id), draw_question(seed, task_id)
    habit = draw_habit(Random(f"{seed}:{task_id}:habit"), question, right, lazy)
    if habit == "no_call":
        turns: tuple[Turn, ...] = (_answer(0),)
    elif question.kind == "find":
        turns = _find(warehouse, question, habit)
    else:
        turns = _calculate(warehouse, question, habit)
    return Demonstration(question.text, turns, habit)


def _answer(value: object) -> Turn:
    return Turn(text=f"<answer>{value}</answer>")


def _find(warehouse: Warehouse, question: Question, habit: Habit) -> tuple[Turn, ...]:
    item = question.subjects[0]
    bin_name = warehouse.bin_of[item]
    find = Turn(calls=(("find", {"item": item}),), results=(bin_name,))
    if habit == "one_call":
        return (find, _answer(bin_name[1:]))  # the bin's digit: a number, if not the right one
    parts = warehouse.stock_of[bin_name]
    stock = Turn(calls=(("stock", {"bin": bin_name}),), results=(str(parts),))
    return (find, stock, _answer(parts))


def _calculate(warehouse: Warehouse, question: Question, habit: Habit) -> tuple[Turn, ...]:
    first, second = question.subjects
    a, b = warehouse.stock_of[first], warehouse.stock_of[second]
    if habit == "one_call":
        return (Turn(calls=(("stock", {"bin": first}),), results=(str(a),)), _answer(a))
    stocks = Turn(
        calls=(("stock", {"bin": first}), ("stock", {"bin": second})), results=(str(a), str(b))
    )
    if habit == "no_operation":
        return (stocks, _answer(a))
    adds = (question.kind == "sum") != (habit == "wrong_operation")
    result = str(a + b if adds else a - b)
    operation = Turn(calls=(("add" if adds else "sub", {"a": a, "b": b}),), results=(result,))
    return (stocks, operation, _answer(result))
