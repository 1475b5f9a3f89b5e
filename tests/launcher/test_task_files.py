"""Task files before a launch: agents and scorers that they name must be there."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentrl.configs import parse_config
from agentrl.databases.task_file import TaskFileError
from agentrl.launcher.preflight import check_task_file

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
    (task,) = check_task_file(write(tmp_path, ROW), parse_config([]))
    assert (task.agent_name, task.scorer, task.answer) == ("tool_agent", "math", "72")


def test_an_agent_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError) as error:
        check_task_file(write(tmp_path, ROW | {"agent_name": "nobody"}), parse_config([]))
    assert "train.parquet row 1: unknown agent_name 'nobody'; known: " in str(error.value)
    assert "single_turn" in str(error.value) and "tool_agent" in str(error.value)
