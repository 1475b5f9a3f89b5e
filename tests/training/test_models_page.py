"""The table of models says what the probe finds of each model that transformers has."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "models_page.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_table_of_models_is_what_the_probe_finds() -> None:
    # A process of its own: it forks, which a process that has computed must not.
    check = [sys.executable, "-W", "ignore", str(SCRIPT), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, f"run `python scripts/models_page.py`\n{done.stderr}"
