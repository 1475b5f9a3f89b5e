"""A short run of the demo, its service in turns with the trainer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 2


@pytest.mark.slow  # a whole run
@pytest.mark.timeout(400)
def test_a_run_trains_while_its_service_has_no_memory(engine_name: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable, "-m", "agentrl.cli", "launch", "grpo", "in-turns",
            "--output_dir", str(tmp_path / "run"), "--max_steps", str(STEPS),
            "--per_device_train_batch_size", "16", "--eval_steps", "0", "--eval_rollouts", "1",
            "--sync_sampling", "true", "--inf_share_gpus", "true",
        ],
        cwd=tmp_path, text=True, capture_output=True, timeout=380,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    served = (tmp_path / "logs" / "as" / "in-turns_serve.log").read_text()
    assert ("SGLang serves" in served) == (engine_name == "sglang")
    trained = (tmp_path / "logs" / "as" / "in-turns_train_0.log").read_text()
    given = list(re.finditer(r"(\d+) services gave their GPU memory to the trainer", trained))
    assert [each[1] for each in given] == ["1"] * (1 + STEPS)
    assert given[0].start() < trained.index("Qwen3ForCausalLM is"), "the model is on the device"
    assert "WARNING" not in trained
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["version"] for line in metrics] == list(range(STEPS))
    for line in metrics:
        # The trainer computes the very logprobs that the service sampled with.
        assert 1 - 1e-3 < line["ratio_min"] <= line["ratio_max"] < 1 + 1e-3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["max_staleness"] == 0
    assert summary["slots"]["failed"] == 0
