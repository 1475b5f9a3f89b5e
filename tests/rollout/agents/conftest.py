"""What the tests of agents share: a stage (`stage.py`)."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.databases.connection import RunDatabase
from agentrl.rollout.agents import agent_registry as registry
from agentrl.rollout.chat import ChatRenderer

sys.path.insert(0, str(Path(__file__).parent))  # `stage`

from stage import Stage


@pytest.fixture
def own_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_samplers", {})


@pytest.fixture
async def stage(
    database: RunDatabase, demo_renderer: ChatRenderer, hostile_server: Any, own_agents: None
) -> AsyncIterator[Stage]:
    stage = Stage(database, demo_renderer, hostile_server.url)
    async with stage.service.running():
        yield stage
