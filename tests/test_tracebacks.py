"""What user code logs is never that code's error, whatever its arguments are."""

import logging
from typing import NoReturn

import pytest

from agentrl.tracebacks import OneTraceback


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> NoReturn:
        raise LookupError("no words")


@pytest.mark.parametrize("arguments", [(Unspeakable(),), (1, 2)], ids=["no text", "too many"])
def test_a_message_that_cannot_be_made_is_let_through(
    arguments: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    log, handler = logging.Logger("user"), logging.StreamHandler()
    handler.addFilter(OneTraceback())
    log.addHandler(handler)
    for _ in range(2):
        try:
            raise Unspeakable
        except Unspeakable:
            log.exception("it failed: %s", *arguments)
    assert "it failed: %s (its arguments raise" in capsys.readouterr().err
