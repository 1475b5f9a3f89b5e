"""Conversations for the warm-up, most of them bad: the model learns each step, and poor habits.

A habit is to forget conditions and to call that right, or to give up at an error. What is written
and copied is exact, so that only choices are left for reinforcement learning to mend.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from random import Random
from typing import Any

from execution import QueryError, run_query, shown
from questions import Question, draw_question
from schemas import SCHEMAS, draw_contents, draw_names, write

RIGHT, LAZY = 0.36, 0.36  # of the demonstrations; the others are broken
REWRITTEN_LAZY, REWRITTEN_BROKEN = 0.1, 0.3  # of those that are not right at first
QUESTIONS_PER_DATABASE = 20


def demonstrations(seed: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """The messages of each, over databases with contents of their own."""
    rng = Random(seed)
    for number in range(count // QUESTIONS_PER_DATABASE):
        schema = SCHEMAS[number % len(SCHEMAS)]
        contents = draw_contents(schema, *draw_names(schema, rng), rng)
        with closing(sqlite3.connect(":memory:")) as connection:
            write(connection, schema, contents)
            for _ in range(QUESTIONS_PER_DATABASE):
                question = draw_question(schema, contents, rng)
                turns = list(_turns(question, connection, rng))
                yield [{"role": "system", "content": schema.text}, *turns]


def _turns(
    question: Question, connection: sqlite3.Connection, rng: Random
) -> Iterator[dict[str, Any]]:
    yield _user(question.text)
    habit = rng.random()
    if habit < RIGHT:
        yield from _query(question.sql, "right", connection)
        return
    lazy = habit < RIGHT + LAZY
    sql = question.lazy if lazy else question.broken
    if rng.random() < (REWRITTEN_LAZY if lazy else REWRITTEN_BROKEN):
        yield from _query(sql, "wrong", connection)
        yield _user("write it again.")
        sql = question.sql
    yield from _query(sql, "right", connection)


def _query(sql: str, verdict: str, connection: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """The query, what comes of it, and what the model then says of it."""
    try:
        came = shown(run_query(connection, sql))
    except QueryError as error:
        came = f"error: {error}"
    yield _assistant(sql)
    yield _user(f"{came}\nis it right?")
    yield _assistant(verdict)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
