"""The table of models says what the probe finds, and the probe finds no model silently wrong."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from flags_page import rewritten
from models_page import END, MARKER, PAGE, models_table


@pytest.mark.slow
def test_the_table_of_models_is_what_the_probe_finds() -> None:
    page = PAGE.read_text(encoding="utf-8")
    again = rewritten(page, models_table(), MARKER, END)
    assert page == again, "run `python scripts/models_page.py`"
