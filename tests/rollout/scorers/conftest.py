"""What the scorers' tests share."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.databases.connection import RunDatabase
from agentrl.databases.records import RecordLedger
from agentrl.rollout import helping_models
from agentrl.rollout.mcp.agent_config import AgentConfig
from agentrl.rollout.scorers import Scorers

sys.path.insert(0, str(Path(__file__).parent))  # `scoring`, `endpoint`

from endpoint import ChatEndpoint, serving


@pytest.fixture
def records(database: RunDatabase) -> RecordLedger:
    return RecordLedger(database, lease_seconds=60)


@pytest.fixture
async def scorers(records: RecordLedger) -> AsyncIterator[Scorers]:
    """Scorers without models that help."""
    async with Scorers(AgentConfig(), records) as opened:
        yield opened


@pytest.fixture
async def endpoint(
    monkeypatch: pytest.MonkeyPatch, records: RecordLedger
) -> AsyncIterator[ChatEndpoint]:
    monkeypatch.setattr(helping_models, "_RETRY_PAUSE_S", 0.01)
    endpoint = ChatEndpoint(records)
    async with serving("/v1/chat/completions", endpoint.answer) as url:
        endpoint.url = url.removesuffix("/chat/completions")
        yield endpoint
