"""Two steps of a program of examples/, in the tests' environment with the frameworks' packages."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo_launch import launch_demo
from pymongo import MongoClient
from stored_rows import (
    Documents,
    assert_logprobs_are_the_models,
    assert_rows_are_their_conversations,
    assert_rows_are_their_turns,
)

from agentrl.databases.mongod import EmbeddedMongod
from agentrl.launcher.deployment import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
[PACKAGES] = Path(os.environ["FRAMEWORKS_PYTHON"]).parents[1].glob("lib/python*/site-packages")
ROWS_PER_STEP, STEPS = 16, 2
FEW = (
    "--max_steps", str(STEPS), "--per_device_train_batch_size", str(ROWS_PER_STEP),
    "--record_timeout", "300",
)  # fmt: skip


@contextmanager
def trained(folder: Path, *flags: str) -> Iterator[Documents]:
    """The database of a run of two steps."""
    done = launch_demo(folder, *FEW, *flags, python_path=[PACKAGES])
    assert done.returncode == 0, done.stdout + done.stderr
    mongod = EmbeddedMongod(folder / "output" / "demo" / "mongo", folder / "mongod.log")
    with mongod, MongoClient(mongod.url) as client:
        yield client["demo"]


def assert_exact(database: Documents, model: Path) -> None:
    """What three others say of the rows, and that no request of the program began a branch."""
    rows = assert_rows_are_their_turns(database)
    assert rows == assert_rows_are_their_conversations(database, model) >= STEPS * ROWS_PER_STEP
    assert assert_logprobs_are_the_models(database, model) > 200
    assert database["records"].count_documents({"n_drifts": {"$ne": 0}}) == 0
