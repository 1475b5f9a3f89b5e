"""A short run of the chaos of programs: nothing is lost or doubled, whatever is killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("chaos_programs.py")


@pytest.mark.timeout(600)
def test_sessions_outlast_a_killed_gateway_program_service_and_database() -> None:
    command = [sys.executable, str(PROGRAM), "--seconds", "40", "--sessions", "8"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["violations"] == 0 and measured["faults"].keys() == {
        "gateway", "program", "service", "database",
    }  # fmt: skip
    assert measured["attempts_taken_over"] > 0 and measured["finished"] > 0
