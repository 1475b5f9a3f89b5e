"""Task files before a launch: agents and scorers that they name must be there."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentrl.configs import parse_config
from agentrl.databases.task_file import TaskFileError
from agentrl.launcher import preflight
from agentrl.launcher.preflight import check_task_file
from agentrl.rollout.agents import agent_registry as registry

ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "agent_name": "tool_agent",
    "prompt": [{"role": "user", "content": "How many?"}],
    "reward_model": {"style": "rule", "ground_truth": "72"},
}


def write(folder: Path, row: dict[str, Any]) -> str:
    path = folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    return str(path)


def test_data_made_for_verl_needs_nothing_more(tmp_path: Path) -> None:
    (task,) = check_task_file(write(tmp_path, ROW), parse_config([])).tasks
    assert (task.agent_name, task.scorer, task.answer) == ("tool_agent", "math", "72")


def test_an_agent_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError) as error:
        check_task_file(write(tmp_path, ROW | {"agent_name": "nobody"}), parse_config([]))
    assert "train.parquet row 1: unknown agent_name 'nobody'; known: " in str(error.value)
    assert "single_turn" in str(error.value) and "tool_agent" in str(error.value)


OWN_AGENTS = """
from agentrl.rollout.agents import register_agent
from agentrl.rollout.agents.single_turn import SingleTurnSampler

class Judging(SingleTurnSampler):
    async def evaluate_record(self, record):
        return record.model_copy(update={"score": 1.0})

async def plain(task, llm, tools):
    return (await llm.chat(llm.task_messages())).text

register_agent("judging", Judging)
register_agent("plain", plain)
"""


def test_only_an_agent_that_scores_itself_needs_neither_answer_nor_scorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_samplers", {})
    module = tmp_path / "own.py"
    module.write_text(OWN_AGENTS, encoding="utf-8")
    file = write(tmp_path, {"query": "How many?", "scorer": "agentcpm"})
    flags = ["--agent_module", str(module), "--agent_name"]
    (task,) = check_task_file(file, parse_config([*flags, "judging"])).tasks
    assert (task.agent_name, task.answer) == (None, None)
    with pytest.raises(TaskFileError, match="1 of 1 tasks have no `answer`"):
        check_task_file(file, parse_config([*flags, "plain"]))


def test_a_large_file_is_checked_to_its_end_beside_the_run_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_FIRST_CHECK_S", 0.0)
    file = tmp_path / "train.jsonl"
    good = [{"query": "q", "answer": str(n), "scorer": "math"} for n in range(300)]
    wrong = {"query": "q", "answer": "=", "scorer": "math"}
    (tmp_path / "run" / "tasks").mkdir(parents=True)
    config = parse_config(["--train_file", str(file), "--output_dir", str(tmp_path / "run")])

    def written(*rows: dict[str, Any]) -> preflight.TaskFileCheck:
        file.write_text("\n".join(map(json.dumps, rows)))
        os.utime(file, (1, 1))
        (check,) = preflight.check_tasks(config)
        return check

    check = written(*good, wrong, {"query": "q", "scorer": "nobody's"})
    assert check.found.n_tasks == 1, "the run begins"
    with pytest.raises(TaskFileError) as error:
        asyncio.run(check.go_on())
    first, second = str(error.value).splitlines()
    assert "train.jsonl:301: `answer`" in first and "scorer math" in first
    assert 'train.jsonl:302: unknown scorer "nobody\'s"' in second
    asyncio.run(written(*good).go_on())
    (again,) = preflight.check_tasks(config)
    assert again.found.n_tasks == 300, "known, and not read again"
