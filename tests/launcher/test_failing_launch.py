"""A whole launch whose attempts mostly fail and which comes to its end all the same."""

import json
import re
from pathlib import Path

import pytest
from demo_launch import demo_lines, launch_demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

# Two attempts of three fail, so that no rollout is given up.
STUMBLING = """\
from collections import Counter

from agentrl import register_agent

tried = Counter()


async def stumbling(task, llm, tools):
    tried[task.id] += 1
    if tried[task.id] % 3:
        return {"turn": tried[task.id]}["answer"]
    reply = await llm.chat([{"role": "user", "content": task.query}], tools.schemas)
    return reply.text


register_agent("stumbling", stumbling)
"""


def test_most_attempts_failed_is_an_exit_status_and_one_traceback(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(STUMBLING)
    (tmp_path / "train.jsonl").write_text("\n".join(demo_lines(24)))
    launch = launch_demo(
        tmp_path, "--train_file", "train.jsonl", "--agent_module", "agent.py",
        "--agent_name", "stumbling", "--num_generations", "4",
        "--per_device_train_batch_size", "16", "--max_steps", "4",
        "--drop_zero_advantage", "false", "--sampler_processes", "1", "--max_failures", "20",
    )  # fmt: skip
    said = launch.stdout
    assert launch.returncode == 1, said + launch.stderr
    assert (tmp_path / "output/demo/summary.json").is_file(), "the run is finished"
    told = re.search(r"(\d+) of (\d+) attempts failed: (\d+) × KeyError: 'answer' \(at ", said)
    assert told is not None, said
    failed, ended, of_kind = map(int, told.groups())
    assert failed == of_kind >= 64 and failed > ended - failed
    assert "`agentrl show demo --failed` lists them" in said
    assert "most attempts failed: the exit status is 1" in said
    shown = [int(count) for count in re.findall(r" failed=(\d+)/\d+ ", said)]
    assert shown == sorted(shown) and shown[-1] > 50, "the live view counts them all"
    record = json.loads((tmp_path / "output/demo/launch.json").read_text())
    assert record["status"] == 1 and "attempts failed" in record["ended"]
    for log in (tmp_path / "logs/as").glob("demo_*.log"):
        text = log.read_text()
        kinds = {line for line in text.splitlines() if line.startswith("KeyError")}
        assert text.count("Traceback") <= len(kinds) <= 1, log
