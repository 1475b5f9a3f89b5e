"""Replicas of a model reduce their gradients once per step, and train what one process trains."""

import json
from pathlib import Path

import torch
from forked import ForkedRanks
from test_equality import assert_equal

HERE = Path(__file__).parent


def test_replicas_reduce_once_per_step_however_many_passes_it_has(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = ForkedRanks(2, log, [str(HERE / "replicas_worker.py"), str(tmp_path)])
    assert ranks.wait(timeout=200) == 0, log.read_text()[-5000:]
    result = json.loads((tmp_path / "result.json").read_text())
    for step in result["steps"]:
        assert step["passes"] > 2, "there are sums to reduce"
        assert step["reductions"] == result["units"]
    assert result["as_if_none_was_left"]
    assert_equal(torch.load(tmp_path / "untied.pt"), "untied")
