"""A client hangs up while its weights are made: the next update has its own pieces only."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from aiohttp import web
from model_families import write_family
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.inference.client import SGLangClient
from agentrl.inference.engine.assembly import WeightAssembly
from agentrl.inference.engine.config import EngineConfig
from agentrl.inference.engine.engine import LocalEngine
from agentrl.inference.engine.server import _Server
from agentrl.inference.protocol import RequestRejected
from agentrl.inference.weights.shared_tensors import share
from agentrl.inference.weights.updates import PublishedWeights, PublishOutcome, update_services
from agentrl.inference.weights.ways import make_updater


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three sets of weights of one model with experts, which folders have in pieces."""
    root = tmp_path_factory.mktemp("experts")
    return [write_family("qwen3_moe", root / str(seed), seed) for seed in range(3)]


@pytest.fixture
async def served(experts: list[Path]) -> AsyncIterator[tuple[LocalEngine, SGLangClient]]:
    """An engine of the first weights, and its client."""
    engine = LocalEngine(EngineConfig(experts[0], dtype="auto", max_running_requests=2))
    runner = web.AppRunner(_Server(engine).app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stepping = asyncio.create_task(engine.run())
    async with SGLangClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
        yield engine, client
    stepping.cancel()
    await runner.cleanup()


class SlowJoin:
    """The first weight of pieces is made once `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        join = WeightAssembly._join

        def slowed(*args: object) -> dict[str, torch.Tensor]:
            self.began.set()
            assert self.go.wait(60)
            return join(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(WeightAssembly, "_join", slowed)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowJoin]:
    slow = SlowJoin(monkeypatch)
    yield slow
    slow.go.set()


async def hang_up(update: "asyncio.Task[object]", slow: SlowJoin) -> None:
    """End the client's connection in the middle of its update."""
    assert await asyncio.to_thread(slow.began.wait, 60)
    update.cancel()
    await asyncio.gather(update, return_exceptions=True)


def assert_holds(engine: LocalEngine, folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in engine.runner.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
async def test_an_update_after_one_whose_client_hung_up_gives_exactly_its_own_weights(
    way: str, served, experts: list[Path], slow: SlowJoin
) -> None:
    engine, client = served
    updater = make_updater(way, torch.device("cpu"))

    def publish(version: int) -> "asyncio.Task[list[PublishOutcome]]":
        folder = experts[version]
        tensors = load_file(folder / "model.safetensors")
        weights = PublishedWeights(version, folder, tensors)
        return asyncio.create_task(update_services(updater, [client], weights))

    await hang_up(publish(1), slow)
    later = publish(2)
    # Long enough for an update that does not wait to come to its own pieces.
    await asyncio.wait({later}, timeout=0.5)
    slow.go.set()
    (outcome,) = await later
    assert outcome.ok, outcome.error
    assert engine.scheduler.version == "2"
    assert_holds(engine, experts[2])
    await updater.close()


async def test_a_session_that_lost_weights_does_not_end_well(
    served, experts: list[Path], slow: SlowJoin
) -> None:
    engine, client = served
    tensors = load_file(experts[1] / "model.safetensors")

    def update() -> "asyncio.Task[None]":
        text = share({name: tensor.clone() for name, tensor in tensors.items()}.items())
        updating = client.update_weights_from_tensor([text], version=1, flush_cache=True)
        return asyncio.create_task(updating)

    await client.begin_weight_update()
    await hang_up(update(), slow)
    slow.go.set()
    with pytest.raises(RequestRejected, match=r"hung up.*publish all of them again"):
        await client.end_weight_update()
    assert_holds(engine, experts[0])


async def test_an_update_from_disk_leaves_the_pieces_of_an_open_session(
    served, experts: list[Path]
) -> None:
    engine, client = served
    tensors = load_file(experts[1] / "model.safetensors")
    halves = list(tensors.items())[::2], list(tensors.items())[1::2]
    await client.begin_weight_update()
    await client.update_weights_from_tensor([share(halves[0])], version=None, flush_cache=False)
    await client.update_weights_from_disk(experts[2], version=2, flush_cache=False)
    await client.update_weights_from_tensor([share(halves[1])], version=1, flush_cache=True)
    await client.end_weight_update()
    made = {name for name in engine.runner.model.state_dict() if "experts" in name}
    expected = AutoModelForCausalLM.from_pretrained(experts[1]).state_dict()
    for name in made:
        torch.testing.assert_close(engine.runner.model.state_dict()[name], expected[name])
