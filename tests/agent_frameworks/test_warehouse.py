"""The programs of examples/warehouse: two steps of each, and the rows that they leave."""

import json
from pathlib import Path

import pytest
from example_run import EXAMPLES, assert_exact, trained

from agentrl.launcher.deployment import REPOSITORY

pytestmark = pytest.mark.timeout(580)


@pytest.mark.parametrize("agent", ["langgraph_agent", "openai_agents_agent"])
def test_the_warehouse_s_clerks_train_on_what_was_sampled(tmp_path: Path, agent: str) -> None:
    entry = f"{EXAMPLES / 'warehouse' / agent}.py:run"
    with trained(tmp_path, "--agent_name", "program", "--agent_entry", entry) as database:
        assert_exact(database, REPOSITORY / "assets" / "demo" / "model")
        asked = {tool["schemas"] for tool in database["tool_lists"].find()}
        assert [json.loads(one)[0]["function"]["name"] for one in asked] == ["find"]
        # The tools answered for the task's own warehouse, also when calls ran beside each other.
        right = list(database["records"].find({"score": 1.0, "n_tool_calls": {"$gte": 2}}))
        assert len(right) >= 4
