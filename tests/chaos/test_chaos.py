"""A short run of the chaos program: every kind of fault, and nothing lost, doubled or late."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from faults import REQUIRED

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("run.py")
SECONDS, SEED = 90, 1


@pytest.mark.timeout(900)
def test_a_run_under_every_kind_of_fault_loses_nothing() -> None:
    command = [
        sys.executable, str(PROGRAM), "--seconds", str(SECONDS), "--faults", str(len(REQUIRED)),
        "--seed", str(SEED), "--calm", "10",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["violations"] == 0
    assert measured["faults"] == sum(measured["faults_by_kind"].values()) == len(REQUIRED)
    assert measured["max_staleness"] <= 2
