"""What the scorers' tests share."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chat_endpoint import ChatEndpoint, chat_endpoint

from agentrl.databases.connection import RunDatabase
from agentrl.databases.records import RecordLedger
from agentrl.rollout.llm import client as llm_client
from agentrl.rollout.llm.models import AgentModels
from agentrl.rollout.scorers import Scorers

sys.path.insert(0, str(Path(__file__).parent))  # `scoring`


@pytest.fixture
def records(database: RunDatabase) -> RecordLedger:
    return RecordLedger(database, lease_seconds=60)


@pytest.fixture
async def scorers(records: RecordLedger) -> AsyncIterator[Scorers]:
    """Scorers without models that help."""
    async with Scorers(AgentModels(), records) as opened:
        yield opened


@pytest.fixture
async def endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ChatEndpoint]:
    """Models that help, with scripted replies."""
    monkeypatch.setattr(llm_client, "_RETRY_PAUSE_S", 0.01)
    async with chat_endpoint() as endpoint:
        yield endpoint
