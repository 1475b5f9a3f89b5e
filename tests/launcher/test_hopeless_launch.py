"""Whole launches of runs that get nowhere: each ends by itself, with its cause in one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo_launch import demo_lines, launch_demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

BUG = """\
from agentrl.rollout.agents import register_agent


async def buggy(task, llm, tools):
    reply = await llm.chat([{"role": "user", "content": task.query}], tools.schemas)
    return {"text": reply.text}["answer"]


register_agent("buggy", buggy)
"""


def ended(folder: Path, *flags: str) -> str:
    """What a launch of the demo says, which ends by itself."""
    hard = [
        json.dumps({**json.loads(line), "answer": "not to be found"}) for line in demo_lines(32)
    ]
    (folder / "hard.jsonl").write_text("\n".join(hard))
    (folder / "bug.py").write_text(BUG)
    launch = launch_demo(folder, "--eval_rollouts", "1", "--eval_file", "hard.jsonl", *flags)
    assert launch.returncode == 1, launch.stdout + launch.stderr
    return launch.stdout


def last_line(output: str) -> str:
    return output.rstrip().splitlines()[-1]


def test_a_bug_in_the_users_agent_ends_the_run_and_leaves_a_small_log(tmp_path: Path) -> None:
    said = ended(tmp_path, "--agent_module", "bug.py", "--agent_name", "buggy")
    for words in ("attempts all failed", "KeyError: 'answer'", "buggy", "bug.py:6", "--failed",
                  "the same command starts it again"):  # fmt: skip
        assert words in last_line(said)
    assert "failures: " in said and "attempts failed (100%)" in said, "the lines before say so too"
    log = (tmp_path / "logs/as/demo_sample-0.log").read_text()
    assert log.count("Traceback") <= 2
    assert not list((tmp_path / "output/demo").glob("checkpoint-*"))
    failed = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "show", "demo", "--failed"],
        cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "KeyError: 'answer'" in failed.stdout and "given up" in failed.stdout


def test_tasks_that_are_too_hard_end_the_run(tmp_path: Path) -> None:
    said = ended(
        tmp_path, "--train_file", "hard.jsonl", "--drop_zero_advantage", "true",
        "--max_failures_without_success", "16",
    )  # fmt: skip
    for words in ("all scores were equal", "too hard for this model", "--drop_zero_advantage",
                  "--max_failures_without_success 16"):  # fmt: skip
        assert words in last_line(said)
    assert "why no step: " in said
