"""What user code logs is never that code's error, whatever its arguments are."""

import logging
import os
import subprocess
import sys
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


def test_control_characters_of_others_are_spelled_out() -> None:
    program = (
        "import logging\nfrom agentrl.tracebacks import log_to_stderr\nlog_to_stderr('%(message)s')"
        "\nlogging.warning('said \\x1b[31m\\nand more')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ended.stderr == "said \\x1b[31m\nand more\n"


@pytest.mark.parametrize(
    ("level", "told"), [("debug", ["of ours", "of a run"]), ("", ["of a run"]), ("WARNING", [])]
)
def test_log_level_is_that_of_our_own_lines(level: str, told: list[str]) -> None:
    program = (
        "import logging\nfrom agentrl.tracebacks import log_to_stderr\nlog_to_stderr('%(message)s')"
        "\nlogging.getLogger('agentrl.rollout').debug('of ours')"
        "\nlogging.getLogger('agentrl.training').info('of a run')"
        "\nlogging.getLogger('pymongo').debug('of a library')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "LOG_LEVEL": level}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.stderr.splitlines() == told
