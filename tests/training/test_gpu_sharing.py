"""Services that share the trainer's GPUs, by real engines and the real ledger."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Forked

from agentrl.databases.connection import RunDatabase
from agentrl.databases.services import (
    acknowledge,
    live_services,
    record_memory,
    register,
    register_urls,
)
from agentrl.inference.client import SGLangClient
from agentrl.inference.memory import MemoryState
from agentrl.inference.protocol import GenerateRequest, RequestRejected, SamplingParams
from agentrl.training.run.gpu_sharing import GpuSharing

DEMO_MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"
PROMPT = tuple(range(40, 60))
SERVE = """
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from agentrl.inference.engine import EngineConfig, serve

@asynccontextmanager
async def announce(url):
    print(url, flush=True)
    yield

serve(EngineConfig(Path(sys.argv[1]), weight_version=sys.argv[2], num_threads=1), announce)
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], str]]:
    """Starts an engine with weights of a version; returns its URL."""
    started: list[Forked] = []

    def start(version: str) -> str:
        process = Forked(["-c", SERVE, str(DEMO_MODEL), version], piped=True)
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()


async def states(database: RunDatabase) -> dict[str, str]:
    return {service.url: service.memory for service in await live_services(database, 60)}


async def test_a_service_gives_its_memory_back_and_takes_it_again(
    database: RunDatabase, start: Callable[[str], str]
) -> None:
    url = start("3")
    await register(database, url, "m", 8, weight_version=3)
    sharing = GpuSharing(database, 60)
    async with SGLangClient(url) as client:
        await client.fetch_limits()
        for _ in range(2):
            assert await sharing.release() == 1
            assert await states(database) == {url: MemoryState.RELEASED}
            assert await sharing.release() == 0  # it has nothing left
            with pytest.raises(RequestRejected, match="resume it first"):
                await client.continue_()
            # Another trainer, after a crash of the first, finds out from the ledger.
            await GpuSharing(database, 60).resume()
            assert await states(database) == {url: MemoryState.HELD}
        await client.continue_()
        made = await client.generate(GenerateRequest("r", PROMPT, SamplingParams(4)))
    assert made.versions[0].version == 3


async def test_a_service_makes_room_before_its_first_publication(
    database: RunDatabase, start: Callable[[str], str]
) -> None:
    """While the trainer loads. One given by URL would not say that it was started again since."""
    url, given = start("default"), start("default")
    await register(database, url, "m", 8)
    await register_urls(database, [given])
    assert await GpuSharing(database, 60).release() == 1
    assert await states(database) == {url: MemoryState.RELEASED, given: MemoryState.HELD}
    await GpuSharing(database, 60).resume()
    assert await states(database) == {url: MemoryState.HELD, given: MemoryState.HELD}
    async with SGLangClient(url) as client:
        await client.continue_()
        assert (await client.generate(GenerateRequest("r", PROMPT, SamplingParams(4)))).output_ids

    assert await GpuSharing(database, 60).release() == 1
    await register(database, url, "m", 8)  # it was started again
    assert await GpuSharing(database, 60).release() == 0, "it has nothing that it could release"


async def test_a_service_that_was_started_since_is_not_resumed(
    database: RunDatabase, start: Callable[[str], str]
) -> None:
    url = start("default")
    await register(database, url, "m", 8)
    await acknowledge(database, url, 7)
    for state in (MemoryState.RELEASED, MemoryState.RELEASING, MemoryState.RESUMING):
        await record_memory(database, url, state)
        await GpuSharing(database, 60).resume()  # a resume would be refused, SGLang dies of it
        assert await states(database) == {url: MemoryState.HELD}


async def test_a_service_that_may_be_in_either_state_is_left_alone(
    database: RunDatabase, start: Callable[[str], str]
) -> None:
    url = start("3")
    await register(database, url, "m", 8, weight_version=3)
    for state in (MemoryState.RELEASING, MemoryState.RESUMING):
        await record_memory(database, url, state)
        await GpuSharing(database, 60).resume()
        assert await GpuSharing(database, 60).release() == 0
        assert await states(database) == {url: state}
    # It was started again and says so.
    await register(database, url, "m", 8, weight_version=3)
    assert await states(database) == {url: MemoryState.HELD}


async def test_a_service_that_refuses_keeps_its_memory_and_one_that_is_gone_holds_up_nobody(
    database: RunDatabase, start: Callable[[str], str]
) -> None:
    busy, gone = start("3"), "http://127.0.0.1:9"
    for url in (busy, gone):
        await register(database, url, "m", 8, weight_version=3)
    async with SGLangClient(busy) as client:
        await client.pause("retract")
        await client.release_memory_occupation()  # by somebody else
        assert await GpuSharing(database, 60).release() == 0
        assert await states(database) == {busy: MemoryState.HELD, gone: MemoryState.RELEASING}
        await client.resume_memory_occupation()
        with pytest.raises(RequestRejected, match="not released"):
            await client.resume_memory_occupation()
        await client.continue_()
