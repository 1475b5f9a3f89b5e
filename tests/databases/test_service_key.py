"""The key of a run's services, which its machines find in the database."""

import asyncio

import pytest

from agentrl.configs.secret_variables import read_key
from agentrl.databases.connection import RunDatabase
from agentrl.databases.service_key import shared_key


async def test_all_machines_of_a_run_find_the_same_key(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set(await asyncio.gather(*(shared_key(database) for _ in range(8))))
    assert len(found) == 1 and await shared_key(database) in found
    [key] = found
    monkeypatch.setenv("KEY", key)
    assert read_key("KEY", "inference_api_key_env") == key  # one that services take
