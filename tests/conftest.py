"""What all tests share: one real mongod for the session, and an empty database for each test."""

import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: tests run beside each other's processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))  # `forked`

from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.importing import importing

# A shell starts a job in the background with SIGINT ignored, and processes that tests start would
# ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines are busy: how long an example takes says nothing about what is tested. `few` examples of
# each property for who waits for the tests, `all` of them in .ci/run: the same ones each time, so
# that what fails has to do with the change. `new` ones are others each time, to look for what
# nobody has found. A test that wants more or less than the rest says so as a share:
# `settings(max_examples=settings.default.max_examples // 5)`
for name, examples in (("few", 25), ("all", 100), ("new", 1000)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=name != "new",
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting imports torch and all else that tests use."""
    with importing():
        return (yield)


# Where there is room in memory, a write does not wait for the disk: a test makes hundreds.
_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 2**31


@pytest.fixture(scope="session")
def mongod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedMongod]:
    """A real mongod that ends with the session."""
    log: Path = tmp_path_factory.mktemp("mongod") / "mongod.log"
    roomy = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM_BYTES
    with TemporaryDirectory(dir=_IN_MEMORY if roomy else None, prefix="agentrl-tests-") as folder:
        server = EmbeddedMongod(Path(folder) / "data", log)
        server.start()
        yield server
        server.kill()  # nobody reads its data again


@pytest.fixture(scope="session")
def database_name() -> str:
    """The name of the session's database."""
    return f"test-{uuid4().hex[:12]}"


@pytest.fixture
async def database(mongod: EmbeddedMongod, database_name: str) -> AsyncIterator[RunDatabase]:
    """An empty database: that of the tests before, cleared.

    To make one takes mongod ten times as long, because each index is a file.
    """
    database = await connect(mongod.url, database_name)
    for collection in await database.database.list_collection_names():
        await database.database[collection].delete_many({})
    yield database
    await database.close()
