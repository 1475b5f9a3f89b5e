"""A disk that fills up under a real mongod, and has space again later: a small disk in memory, in a
namespace that outlives the mongod."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import scripted_run
from pymongo.errors import PyMongoError
from replica_set import Member, ReplicaSet
from verify import row_violations, slot_violations

from agentrl.databases.connection import connect, retry_through_outages
from agentrl.databases.documents import TaskStatus

DISK_MB = 192
GROUPS = 40
FULL_S = 3.0
_MOUNT = "mount -t tmpfs -o size={size}m none {folder} && mkdir {folder}/data"


@dataclass(frozen=True)
class SmallDisk:
    """A disk of its own, at `folder` for those who enter by `command`."""

    folder: Path
    keeper: int

    @property
    def command(self) -> list[str]:
        return ["nsenter", "--preserve-credentials", "--user", "--mount", f"--target={self.keeper}"]

    @property
    def _filler(self) -> Path:
        return Path(f"/proc/{self.keeper}/root{self.folder}/filler")

    def fill(self) -> None:
        """To the last byte."""
        # Unbuffered: what found no room would be written again, and fail, as the file is closed.
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    script = _MOUNT.format(size=DISK_MB, folder=folder) + " && echo mounted && exec cat"
    keeper = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert keeper.stdout is not None and keeper.stdin is not None
    if keeper.stdout.readline() != b"mounted\n":
        pytest.skip("no user namespaces here: see tests/network.sh")
    try:
        yield SmallDisk(folder, keeper.pid)
    finally:
        keeper.stdin.close()
        keeper.wait()


def store_until_it_ends(member: Member) -> int:
    """Store documents until mongod has no room and ends, as is its way; returns how many it has."""
    stored = 0
    with member.client() as client:
        while member.alive and stored < 1000:
            with suppress(PyMongoError):
                client["other"]["documents"].insert_one({"text": os.urandom(100_000)})
                stored += 1
    assert member.process is not None and member.process.wait(10) != 0
    return stored


@pytest.mark.slow
async def test_a_disk_that_is_full_for_a_while_costs_time_and_nothing_else(
    disk: SmallDisk, tmp_path: Path
) -> None:
    members = ReplicaSet(tmp_path, members=1)
    (member,) = members.members
    member.folder, member.before = disk.folder / "data", disk.command
    with members:
        database = await connect(members.url, "run")
        await scripted_run.begin_run(database)
        await scripted_run.add(database, GROUPS)
        flags = scripted_run.config("--max_concurrent_samples_per_process", "4")
        scripted = scripted_run.agent(lambda claim: float(claim.rollout), pause_s=0.05)

        async def finished() -> int:
            return await retry_through_outages(
                lambda: database.tasks.count_documents({"status": TaskStatus.COMPLETED}), "a look"
            )

        async with scripted_run.scheduler(database, scripted, flags) as sampler:
            sampling = asyncio.create_task(sampler.run())
            while await finished() < GROUPS // 4:
                await asyncio.sleep(0.02)
            disk.fill()
            stored = await asyncio.to_thread(store_until_it_ends, member)
            await asyncio.sleep(FULL_S)
            disk.free()
            member.start()
            while await finished() < GROUPS:
                await asyncio.sleep(0.05)
            sampler.stop()
            await asyncio.wait_for(sampling, 30)
        # One more may be there: its answer was lost with the server.
        assert await database.client["other"]["documents"].count_documents({}) >= stored
        tasks, records, turns, rows = [
            await collection.find().to_list()
            for collection in (database.tasks, database.records, database.turns, database.rows)
        ]
        await database.close()
    assert [*slot_violations(tasks, records), *row_violations(records, rows)] == []
    assert len(tasks) == GROUPS and len(rows) == 2 * GROUPS
    assert {turn["record_id"] for turn in turns} >= {row["_id"] for row in rows}
