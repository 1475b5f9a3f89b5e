"""What commands print can do nothing to a terminal but show text."""

import io
import json
import re

import pytest
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentrl.foreign_text import visible_json
from agentrl.launcher.console import TerminalConsole

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mRED\u202e\x9b31m\x00\udc80 1\x08\r0\u2028\x7f"
OWN_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def in_table(text: str) -> Table:
    table = Table(text)
    table.add_row(Text(text, "red"), end_section=True)
    return table


@pytest.mark.parametrize("made", [str, Text, in_table, Rule, lambda text: Panel("a", title=text)])
def test_texts_of_tools_and_models_are_shown_and_not_obeyed(made: type[Text]) -> None:
    out = io.StringIO()
    console = TerminalConsole(file=out, force_terminal=True, width=200)
    console.print(made(HOSTILE), style="green", markup=False)
    printed = out.getvalue()
    plain = OWN_COLOURS.sub("", printed)
    assert r"\x1b[2J" in plain
    assert r"RED\u202e\x9b31m" in plain or made is in_table  # a column was measured without them
    assert plain.replace("\n", "").isprintable(), ascii(plain)
    assert plain != printed, "its own colours are there"


def test_json_says_the_same_and_holds_no_control_codes() -> None:
    printed = visible_json(json.dumps({HOSTILE: [HOSTILE, "é 中文"]}, ensure_ascii=False, indent=1))
    assert json.loads(printed) == {HOSTILE: [HOSTILE, "é 中文"]}
    assert printed.replace("\n", "").isprintable() and "é 中文" in printed


def test_what_people_write_stays_as_it_is() -> None:
    out = io.StringIO()
    console = TerminalConsole(file=out, width=200)
    text = "é 中文 👩‍🚀\u00a0שלום\nnext"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    assert out.getvalue() == text + "\n"
