"""Publication over a real ledger to real engines: by every way, to late and restarted ones."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from forked import Forked
from ports import free_port
from tiny import tiny_model, write_tiny_folder

from agentrl.configs import ComputeConfig
from agentrl.databases import policies, services
from agentrl.databases.connection import RunDatabase
from agentrl.inference.client import SGLangClient
from agentrl.inference.weights import updates
from agentrl.inference.weights.ways import make_updater
from agentrl.training.model.model_folder import load_tokenizer
from agentrl.training.model.prepare import prepare_model
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import make_mesh
from agentrl.training.run.publication import Publication, Publisher, make_publication

CPU = torch.device("cpu")
SILENT_S = 60.0


class Engine:
    """A local engine on a port that it keeps over restarts."""

    def __init__(self, model: Path, log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [
            "-m", "agentrl.cli", "serve", "--model", str(model),
            "--port", str(port), "--max_running_requests", "4",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = Forked(self._command, log=self._log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def ready(self) -> None:
        async with SGLangClient(self.url) as client:
            async with asyncio.timeout(60):
                while not await client.ready():
                    assert self.process.poll() is None, self._log.read_text()
                    await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def engines(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    logs = tmp_path_factory.mktemp("logs")
    started = Engine(base, logs / "first"), Engine(base, logs / "second")
    yield started
    for engine in started:
        engine.process.send_signal(signal.SIGCONT)
        engine.kill()


@pytest.fixture
def publication(base: Path, tmp_path: Path) -> Callable[[int], Publication]:
    """Makes publications of a model that differs from what engines start with."""
    model = tiny_model()
    prepare_model(model, make_mesh(Accelerator(cpu=True)), ComputeConfig())
    tokenizer, form = load_tokenizer(str(base)), written_form(model)
    gatherer = WeightGatherer(model, form, torch.float32)

    def make(version: int) -> Publication:
        with torch.no_grad():
            next(model.parameters()).add_(0.01)
        staged = gatherer.stage()
        staged.copied.result()
        return make_publication(tmp_path, version, version, staged, form, tokenizer, torch.float32)

    return make


async def ours() -> None:
    """Nobody takes the run."""


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await holds():
            await asyncio.sleep(0.05)


async def serving(database: RunDatabase) -> set[str]:
    return {service.url for service in await services.serving(database, SILENT_S)}


@pytest.mark.parametrize("way", ["disk", "distributed", "tensor"])
async def test_a_publication_reaches_services_ledger_and_disk(
    database: RunDatabase, engines, publication, tmp_path: Path, way: str
) -> None:
    engine, _ = engines
    await engine.ready()
    await services.register_urls(database, [engine.url])
    publisher = Publisher(
        database, tmp_path, SILENT_S, make_updater(way, CPU), "retract", hold=ours
    )
    for version in range(4):
        assert await publisher.publish(publication(version)) > 0
        assert await serving(database) == {engine.url}
    await publisher.close()
    async with SGLangClient(engine.url) as client:
        assert await client.weight_version() == 3
    latest = await policies.latest(database)
    assert latest is not None and (latest.version, latest.step) == (3, 3)
    folders = sorted(folder.name for folder in (tmp_path / "weights").iterdir())
    assert folders == ["v1", "v2", "v3"]


async def test_gathered_weights_do_not_change_with_the_model(base: Path, tmp_path: Path) -> None:
    model = tiny_model()
    prepare_model(model, make_mesh(Accelerator(cpu=True)), ComputeConfig())
    staged = WeightGatherer(model, written_form(model), torch.float32).stage()
    before = {name: tensor.clone() for name, tensor in staged.gather().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], t) for name, t in staged.gather().items())


async def test_a_service_that_misses_a_publication_gets_no_work_until_it_has_caught_up(
    database: RunDatabase, engines, publication, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("agentrl.inference.weights.updates._GRACE_S", 0.5)
    monkeypatch.setattr("agentrl.inference.weights.updates._CONTINUE_S", 0.5)
    engine, other = engines
    both = {engine.url, other.url}
    await asyncio.gather(engine.ready(), other.ready())
    await services.register_urls(database, both)
    updater = make_updater("distributed", CPU)
    publisher = Publisher(database, tmp_path, SILENT_S, updater, "retract", hold=ours)
    await publisher.publish(publication(0))
    assert await serving(database) == both
    engine.process.send_signal(signal.SIGSTOP)
    await publisher.publish(publication(1))
    assert await serving(database) == {other.url}
    engine.process.send_signal(signal.SIGCONT)
    keeping = asyncio.create_task(publisher.keep_current(SILENT_S))

    async def both_serve() -> bool:
        return await serving(database) == both

    async def caught_up() -> bool:
        async with SGLangClient(engine.url) as client:
            return await client.weight_version() == 1

    await until(both_serve)
    assert await caught_up()

    # Killed and started anew behind the ledger's back, it holds what it was started with.
    engine.kill()
    engine.start()
    await engine.ready()
    await until(caught_up)
    await until(both_serve)
    keeping.cancel()
    await publisher.close()


async def test_a_hung_service_holds_up_neither_the_others_nor_later_publications(
    database: RunDatabase, engines, publication, tmp_path: Path
) -> None:
    healthy, hung = engines
    both = {healthy.url, hung.url}
    await asyncio.gather(healthy.ready(), hung.ready())
    await services.register_urls(database, both)
    publisher = Publisher(
        database, tmp_path, SILENT_S, make_updater("tensor", CPU), "retract", hold=ours
    )
    await publisher.publish(publication(0))
    assert await serving(database) == both
    hung.process.send_signal(signal.SIGSTOP)
    try:
        for version in (1, 2, 3):
            began = time.monotonic()
            await publisher.publish(publication(version))
            assert time.monotonic() - began < updates._GRACE_S, "when it would be cut off"
            assert await serving(database) == {healthy.url}
    finally:
        hung.process.send_signal(signal.SIGCONT)
    keeping = asyncio.create_task(publisher.keep_current(SILENT_S))

    async def both_serve() -> bool:
        return await serving(database) == both

    await until(both_serve)
    async with SGLangClient(hung.url) as client:
        assert await client.weight_version() == 3
    keeping.cancel()
    await publisher.close()


async def test_a_service_has_work_as_soon_as_it_has_the_weights(
    database: RunDatabase, engines, publication, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("agentrl.training.run.publication._LATE_S", 60.0)
    healthy, hung = engines
    await asyncio.gather(healthy.ready(), hung.ready())
    await services.register_urls(database, [healthy.url, hung.url])
    publisher = Publisher(
        database, tmp_path, SILENT_S, make_updater("disk", CPU), "retract", hold=ours
    )
    hung.process.send_signal(signal.SIGSTOP)
    try:
        # Before the first publication no service has work.
        publishing = asyncio.create_task(publisher.publish(publication(0)))

        async def healthy_serves() -> bool:
            return await serving(database) == {healthy.url}

        await until(healthy_serves)
        assert not publishing.done()
        hung.process.send_signal(signal.SIGCONT)
        await publishing
        assert await serving(database) == {healthy.url, hung.url}
    finally:
        hung.process.send_signal(signal.SIGCONT)
    await publisher.close()


async def test_what_cannot_be_written_is_an_error_of_the_publication(
    database: RunDatabase, publication, tmp_path: Path
) -> None:
    (tmp_path / "weights").write_text("a file where the folder should be")
    publisher = Publisher(
        database, tmp_path, SILENT_S, make_updater("disk", CPU), "retract", hold=ours
    )
    with pytest.raises(RuntimeError, match="cannot be written"):
        await publisher.publish(publication(0))
