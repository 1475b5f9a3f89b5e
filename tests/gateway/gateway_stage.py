"""The fixtures of the gateway's tests: a stage for attempts (`stage.py`)."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.databases.connection import RunDatabase
from agentrl.rollout.chat import ChatRenderer

_ROLLOUT = Path(__file__).parents[1] / "rollout"
DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo" / "model"
for _folder in (Path(__file__).parent, _ROLLOUT, _ROLLOUT / "agents"):
    sys.path.insert(0, str(_folder))  # `open_session`, `answering_service`, `stage`

from stage import Stage  # noqa: E402


@pytest.fixture(scope="session")
def demo_renderer() -> ChatRenderer:
    return ChatRenderer.load(DEMO_MODEL)


@pytest.fixture
async def stage(database: RunDatabase, demo_renderer: ChatRenderer) -> AsyncIterator[Stage]:
    stage = Stage(database, demo_renderer, "http://127.0.0.1:9/mcp")
    stage.flags = ("--agent_name", "program", "--agent_command", sys.executable)
    async with stage.service.running():
        yield stage
