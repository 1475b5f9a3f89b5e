"""What all tests share: one real mongod for the session, and a fresh database for each test."""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: tests run beside each other's processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))  # `forked`

from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.mongod import EmbeddedMongod

# A shell starts a job in the background with SIGINT ignored, and processes that tests start would
# ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines are busy: how long an example takes says nothing about what is tested. `few` examples of
# each property for who waits for the tests, `all` of them in .ci/run. A test that wants more or
# less than the rest says so as a share: `settings(max_examples=settings.default.max_examples // 5)`
for name, examples in (("few", 25), ("all", 100)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("EXAMPLES", "few"))


# What takes longest, longest first: with several workers a long file must not be left for the end.
_BEGUN_FIRST = (
    "end_to_end/test_run.py", "contract/test_conformance.py", "training/test_trainer.py",
    "training/test_checkpoint.py", "training/test_runs_of_losses.py", "training/parallel/",
    "rollout/tools/test_endless_answers.py", "rollout/tools/test_transports.py",
    "inference/", "training/", "databases/test_rows_machine.py", "databases/test_ledger_machine.py",
    "contract/", "deployment/", "rollout/", "launcher/test_launch.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which workers should take them; the tests of a file stay in theirs."""
    items.sort(key=lambda item: _rank(item.path.relative_to(Path(__file__).parent).as_posix()))


def _rank(file: str) -> int:
    ranks = (rank for rank, start in enumerate(_BEGUN_FIRST) if file.startswith(start))
    return next(ranks, len(_BEGUN_FIRST))


@pytest.fixture(scope="session")
def mongod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedMongod]:
    """A real mongod that ends with the session."""
    folder: Path = tmp_path_factory.mktemp("mongod")
    with EmbeddedMongod(folder / "data", folder / "mongod.log") as server:
        yield server


@pytest.fixture
async def database(mongod: EmbeddedMongod) -> AsyncIterator[RunDatabase]:
    """An empty database of the test's own."""
    database = await connect(mongod.url, f"test-{uuid4().hex[:12]}")
    yield database
    await database.client.drop_database(database.name)
    await database.close()
