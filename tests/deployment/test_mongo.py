"""`deploy/mongo` for real: a mongod with authentication and TLS, and what a run's user may do."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
import scripted_run
from ports import free_port
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError

from agentrl.databases import outages, services
from agentrl.databases.changes import Changes, inserted
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.mongod import find_mongod
from agentrl.databases.runs import RunLease
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "mongo"
ADDRESS = "127.0.0.2"  # not the one that the administrator's first steps go through
RUN = "run-1"


@dataclass(frozen=True)
class Member:
    """The one member of a replica set, and the administrator's connection string."""

    host: str
    ca: Path
    admin_url: str


def administer(*arguments: str) -> str:
    """What `administer.py` prints."""
    command = [sys.executable, str(FOLDER / "administer.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def add_run(member: Member, run: str) -> str:
    """The connection string of the run's user, new or with a new password."""
    return administer("add-run", run, "--url", member.admin_url).removeprefix("DB_URL=")


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    folder = tmp_path_factory.mktemp("mongo")
    secrets, data, port = folder / "secrets", folder / "data", free_port()
    subprocess.run([str(FOLDER / "make_secrets.sh"), str(secrets), ADDRESS], check=True)
    node = folder / "node"  # what is on the node: its own certificate only
    node.mkdir()
    data.mkdir()
    for file in (secrets / "keyfile", secrets / "ca.pem", secrets / ADDRESS / "node.pem"):
        (node / file.name).write_bytes(file.read_bytes())
    environment = {
        **os.environ, "PATH": f"{find_mongod().parent}:{os.environ['PATH']}",
        "MONGO_ADDRESS": ADDRESS, "MONGO_SECRETS": str(node), "MONGO_DATA": str(data),
        "MONGO_PORT": str(port), "MONGO_CACHE_GB": "0.25",
    }  # fmt: skip
    log = folder / "mongod.log"
    with log.open("wb") as output:
        mongod = subprocess.Popen(
            ["bash", str(FOLDER / "mongod.sh")], env=environment, stdout=output, stderr=output
        )
    try:
        host, ca = f"{ADDRESS}:{port}", node / "ca.pem"
        admin_url = administer("initiate", host, "--ca", str(ca))
        yield Member(host, ca, admin_url)
    finally:
        mongod.terminate()
        mongod.wait()


async def test_the_user_of_a_run_can_do_all_that_a_run_does(member: Member) -> None:
    database = await connect(add_run(member, RUN), RUN)  # makes the indexes
    try:
        lease = RunLease(database, "trainer", "host", lease_seconds=60)
        await lease.acquire(8)
        ledger = TaskLedger(database, "sampler", lease_seconds=60, max_failures=2)
        line = TaskLine(id="a", query="?", answer="!")
        async with Changes(database, inserted(database.tasks)) as changes:
            await ledger.add(make_tasks([line], Split.TRAIN, 0, 2, [0]))
            await changes.wait(30)
            assert changes.streaming
        assert await ledger.leave_out(1) == 1
        await database.rows.insert_one({"_id": "row", "status": "ready"})
        await database.rows.update_many({}, {"$set": {"status": "leased"}})
        assert await database.rows.count_documents({"status": "leased"}) == 1
        await services.register(database, "http://gpu:30000", "model", 8)
        await services.unregister(database, "http://gpu:30000")
        assert await services.live_services(database, 60) == []
        await outages.report(database, "sampler", [outages.OpenBreaker("the judge", 1.0, "gone")])
        assert len(await outages.current(database)) == 1
        await outages.report(database, "sampler", [])
        await lease.release()
    finally:
        await database.close()


Forbidden = Callable[[Database[dict[str, Any]]], object]


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda own: own["records"].delete_one({}),
        lambda own: own["records"].drop(),
        lambda own: own.client.drop_database(own.name),
        lambda own: own.client["run-2"]["tasks"].find_one(),
        lambda own: own.client["run-2"]["tasks"].insert_one({}),
        lambda own: own.command("createUser", "other", pwd="x", roles=["readWrite"]),
        lambda own: own.command("grantRolesToUser", RUN, roles=["dbOwner"]),
        lambda own: own.client.admin.command("shutdown"),
    ],
)
def test_and_nothing_else_or_elsewhere(member: Member, forbidden: Forbidden) -> None:
    with MongoClient[dict[str, Any]](add_run(member, RUN)) as client:
        client[RUN]["records"].insert_one({"made": datetime.now(UTC)})
        with pytest.raises(OperationFailure) as refused:
            forbidden(client[RUN])
    assert refused.value.code == 13  # Unauthorized


def why_refused(url: str) -> PyMongoError:
    """The error of a first look at the run's tasks."""
    with (
        MongoClient[dict[str, Any]](url, serverSelectionTimeoutMS=1500) as client,
        pytest.raises(PyMongoError) as refused,
    ):
        client[RUN]["tasks"].find_one()
    return refused.value


def test_nobody_comes_in_without_password_or_encryption(member: Member, tmp_path: Path) -> None:
    add_run(member, RUN)
    ca = f"tlsCAFile={quote_plus(str(member.ca))}"
    assert isinstance(why_refused(f"mongodb://{member.host}/?tls=true&{ca}"), OperationFailure)
    stranger = f"mongodb://{RUN}:guessed@{member.host}/?authSource={RUN}&tls=true&{ca}"
    assert isinstance(why_refused(stranger), OperationFailure)
    plain = f"mongodb://{member.host}/?directConnection=true"
    assert isinstance(why_refused(plain), ConnectionFailure)
    subprocess.run([str(FOLDER / "make_secrets.sh"), str(tmp_path), ADDRESS], check=True)
    impostor = f"mongodb://{member.host}/?tls=true&tlsCAFile={quote_plus(f'{tmp_path}/ca.pem')}"
    assert "certificate" in str(why_refused(impostor))


def test_a_new_password_ends_the_old_one_and_a_removed_user_is_gone(member: Member) -> None:
    old, new = add_run(member, RUN), add_run(member, RUN)
    assert isinstance(why_refused(old), OperationFailure)
    with MongoClient[dict[str, Any]](new) as client:
        client[RUN]["tasks"].find_one()
    administer("remove-run", RUN, "--url", member.admin_url)
    administer("remove-run", RUN, "--url", member.admin_url)  # already gone: nothing to do
    assert isinstance(why_refused(new), OperationFailure)


@pytest.mark.slow
async def test_the_password_of_a_run_is_changed_while_it_goes_on(member: Member) -> None:
    """As the guide says: a further user, processes begun anew one by one, the old user removed."""
    name = "rotated"
    before = add_run(member, name)
    old = await connect(before, name)
    await scripted_run.begin_run(old)
    await scripted_run.add(old, 40)
    scripted = scripted_run.agent(lambda claim: float(claim.rollout), pause_s=0.05)
    flags = scripted_run.config("--max_concurrent_samples_per_process", "2")

    async def finished(database: RunDatabase) -> int:
        return await database.tasks.count_documents({"status": "completed"})

    async with scripted_run.scheduler(old, scripted, flags, owner="old") as sampler:
        sampling = asyncio.create_task(sampler.run())
        while await finished(old) < 5:
            await asyncio.sleep(0.02)
        after = administer("rotate-run", name, "--url", member.admin_url).removeprefix("DB_URL=")
        new = await connect(after, name)
        async with scripted_run.scheduler(new, scripted, flags, owner="new") as another:
            going_on = asyncio.create_task(another.run())
            done = await finished(new)
            while await finished(new) < done + 5:
                await asyncio.sleep(0.02)
            sampler.stop()
            await asyncio.wait_for(sampling, 30)
            await old.close()
            administer("retire-run", name, "--url", member.admin_url)
            assert isinstance(why_refused(before), OperationFailure)
            while await finished(new) < 40:
                await asyncio.sleep(0.02)
            another.stop()
            await asyncio.wait_for(going_on, 30)
    slots = [slot async for task in new.tasks.find() for slot in task["slots"]]
    records = await new.records.find().to_list()
    await new.close()
    assert {slot["status"] for slot in slots} == {"completed"}
    assert {record["owner"] for record in records} == {"old", "new"}
    kept = [record["_id"] for record in records if record["status"] != "failed"]
    assert sorted(kept) == sorted(slot["record"] for slot in slots), "each rollout once"
    # once more: the newest user's own password, and then nobody's
    assert f"//{name}.1:" in after
    assert f"//{name}.1:" in add_run(member, name)
    assert isinstance(why_refused(after), OperationFailure)


def test_a_second_member_gets_a_certificate_of_the_same_authority(tmp_path: Path) -> None:
    script = str(FOLDER / "make_secrets.sh")
    subprocess.run([script, str(tmp_path), "db1.lan"], check=True)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    subprocess.run([script, str(tmp_path), "db1.lan", "10.0.0.2"], check=True)
    changed = [p.name for p, content in first.items() if p.read_bytes() != content]
    assert changed in ([], ["ca.srl"])
    for name in ("db1.lan", "10.0.0.2"):
        verify = ["openssl", "verify", "-CAfile", "ca.pem", f"{name}/node.pem"]
        assert subprocess.run(verify, cwd=tmp_path, capture_output=True).returncode == 0
        assert (tmp_path / name / "node.pem").stat().st_mode & 0o077 == 0
