"""The demo's world: a warehouse that is drawn anew for every task, and the questions about it.

A warehouse follows from a world seed and a task id alone, so the tools can rebuild it for any call
while the model, which sees only the question, cannot know or memorise it. Nothing in here talks MCP
(`warehouse_tools.py`) or writes files (`make_tasks.py`).
"""

import random
from dataclasses import dataclass
from math import log
from random import Random
from string import ascii_uppercase
from typing import Literal, get_args

Kind = Literal["find", "sum", "diff"]
KINDS: tuple[Kind, ...] = get_args(Kind)

BINS_PER_WAREHOUSE = 12
SECONDS_SIGMA = 1.2  # of the logarithm of the seconds of a slow call
BINS = tuple(letter + digit for letter in ascii_uppercase for digit in "0123456789")
# fmt: off
ITEMS = (
    "bolt", "nut", "gear", "lamp", "rope", "pump", "fan", "hose", "drill", "valve", "wheel",
    "chain", "panel", "cable", "motor", "hinge", "brick", "tile", "screw", "spring", "clamp",
    "lever", "belt", "plate",
)
# fmt: on


@dataclass(frozen=True)
class Warehouse:
    """`bin_of[item]` names the bin that holds an item, `stock_of[bin]` how many parts lie in it."""

    bin_of: dict[str, str]
    stock_of: dict[str, int]


@dataclass(frozen=True)
class Question:
    """One question about one warehouse.

    `subjects` is what the question names: the item of a `find`, the two bins of a `sum` or a
    `diff` in the order in which the answer uses them.
    """

    kind: Kind
    text: str
    subjects: tuple[str, ...]
    answer: int


def draw_warehouse(seed: int, task_id: str) -> Warehouse:
    """The warehouse of a task: 12 bins, one item and 10 to 99 parts in each."""
    rng = Random(f"{seed}:{task_id}")
    bins = rng.sample(BINS, BINS_PER_WAREHOUSE)
    items = rng.sample(ITEMS, BINS_PER_WAREHOUSE)
    return Warehouse(
        bin_of=dict(zip(items, bins, strict=True)),
        stock_of={name: rng.randint(10, 99) for name in bins},
    )


def draw_question(seed: int, task_id: str) -> Question:
    """The question of a task. Each takes at least two tool calls, one fed by the other's result."""
    warehouse = draw_warehouse(seed, task_id)
    rng = Random(f"{seed}:{task_id}:question")
    kind = rng.choice(KINDS)
    if kind == "find":
        item = rng.choice(list(warehouse.bin_of))
        return Question(
            kind=kind,
            text=f'How many parts of "{item}" are there?',
            subjects=(item,),
            answer=warehouse.stock_of[warehouse.bin_of[item]],
        )
    first, second = rng.sample(list(warehouse.stock_of), 2)
    if kind == "sum":
        return Question(
            kind=kind,
            text=f"How many parts are in bins {first} and {second} together?",
            subjects=(first, second),
            answer=warehouse.stock_of[first] + warehouse.stock_of[second],
        )
    if warehouse.stock_of[first] < warehouse.stock_of[second]:
        first, second = second, first
    return Question(
        kind=kind,
        text=f"How many more parts are in bin {first} than in bin {second}?",
        subjects=(first, second),
        answer=warehouse.stock_of[first] - warehouse.stock_of[second],
    )


def draw_seconds(median: float) -> float:
    """How long a slow tool's call takes: log-normal, one call in ten takes 4.7 times the median."""
    return random.lognormvariate(log(median), SECONDS_SIGMA)
