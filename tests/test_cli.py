"""The command as a user meets it."""

import subprocess
import sys
from importlib import import_module

import pytest

from agentrl.cli import VERBS, main
from agentrl.user_errors import USER_ERRORS


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and verb.help in shown for name, verb in VERBS.items())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_of_its_own(verb: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", verb, "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert f"agentrl {verb}" in result.stdout


def test_every_error_for_users_exists() -> None:
    for module, name in USER_ERRORS:
        assert issubclass(getattr(import_module(module), name), Exception)


def test_an_unknown_verb_is_told_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "no verb 'trian'; there are launch, train" in capsys.readouterr().err


def test_a_wrong_flag_is_one_sentence_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--max_turns", "many"]) == 2
    assert capsys.readouterr().err == "agentrl sample: --max_turns many: must be a whole number\n"
