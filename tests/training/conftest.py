"""The trainer's core, launched once with one process and once with two."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from agentrl.databases.mongod import EmbeddedMongod
from agentrl.stop_signals import STOP_SIGNALS

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE))  # `tiny` and others, which launched processes import too

from forked import ForkedRanks, preload_training  # noqa: E402
from trainer_run import Run  # noqa: E402

preload_training()


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """A test that shards a model leaves no process group to the next."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of the worker's results, by number of processes."""
    folders = {n: tmp_path_factory.mktemp("ranks") / str(n) for n in (1, 2)}
    for folder in folders.values():
        folder.mkdir()
    running = {
        n: ForkedRanks(n, folder / "log", [str(HERE / "worker.py"), str(folder)])
        for n, folder in folders.items()
    }
    for n, ranks in running.items():
        assert ranks.wait() == 0, (folders[n] / "log").read_text()
    return folders


@pytest.fixture
def run(tmp_path: Path, mongod: EmbeddedMongod) -> Iterator[Run]:
    run = Run(tmp_path, mongod.url)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    run.database(lambda db: db.client.drop_database(db.name))
