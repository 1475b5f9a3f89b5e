"""The probe on several processes, where each has a part of every weight."""

from pathlib import Path

import pytest
from forked import ForkedRanks

WORKER = Path(__file__).with_name("probe_worker.py")


@pytest.mark.slow
def test_rounding_to_bfloat16_is_no_reason_against_trees_on_two_processes(tmp_path: Path) -> None:
    ranks = ForkedRanks(2, tmp_path / "log", [str(WORKER), "llama", "qwen2"])
    assert ranks.wait(timeout=100) == 0, (tmp_path / "log").read_text()
