"""Demonstrations of the demo's tasks, most of them lazy: what the model's warm-up imitates.

Every demonstration copies names and numbers exactly and only its habit may be wrong, so that
the model masters each single step while its choice of steps is bad: the choice is what
reinforcement learning has to repair. No tokens in here (`make_model.py`).
"""

from dataclasses import dataclass
from random import Random
from typing import Literal, cast, get_args

from warehouse import Question, Warehouse, draw_question, draw_warehouse

Habit = Literal["right", "one_call", "no_call"]


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


def draw_habit(rng: Random, right: float, one_call: float) -> Habit:
    """`right` and `one_call` are shares of all demonstrations; the rest answers without a call.

    One bad habit has to be at least as frequent as the right one. Were the wrong ways evenly
    spread, then the right one would be the most likely already, and greedy decoding would hide
    that anything is wrong.
    """
    [habit] = rng.choices(get_args(Habit), weights=(right, one_call, 1.0 - right - one_call))
    return cast(Habit, habit)


def demonstrate(seed: int, task_id: str, right: float, one_call: float) -> Demonstration:
    """A demonstration for the task `task_id` of world `seed`; the shares as in `draw_habit`."""
    warehouse, question = draw_warehouse(seed, task_id), draw_question(seed, task_id)
    habit = draw_habit(Random(f"{seed}:{task_id}:habit"), right, one_call)
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
    operation = Turn(
        calls=(("add" if question.kind == "sum" else "sub", {"a": a, "b": b}),),
        results=(str(question.answer),),
    )
    return (stocks, operation, _answer(question.answer))
