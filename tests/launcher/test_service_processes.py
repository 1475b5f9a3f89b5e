"""`agentrl serve --services N`: where services are placed, and several of them on a real mongod."""

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed_models import LARGE, MIDDLE, SMALL
from ports import free_port

from agentrl.configs import ConfigError
from agentrl.configs.verbs import serve_parser
from agentrl.databases.connection import connect
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.services import live_services
from agentrl.launcher.inventory import GIB, described
from agentrl.launcher.placement import USABLE, Asked, ModelSizes
from agentrl.launcher.service_processes import parts, placed, places
from agentrl.subreaper import descendants
from agentrl.training.model.memory_model import MemorySetup

MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"
ASKED = Asked(tokens=16384, setup=MemorySetup(tokens=1))


@given(
    st.sampled_from((SMALL, MIDDLE, LARGE)),
    st.integers(1, 8),
    st.sampled_from((24, 80, 141)),
    st.sampled_from((None, None, 1, 2, 4)),
    st.sampled_from((None, None, 1, 2, 8)),
)
def test_services_of_a_node_have_equal_gpus_of_their_own(
    model: ModelSizes, gpus: int, gib: int, tp: int | None, count: int | None
) -> None:
    inventory = described(f"{gpus}x{gib}")
    try:
        found = placed(inventory, model, replace(ASKED, inf_tp=tp, services=count), "sglang")
    except ConfigError as error:
        assert "does not fit" in str(error)
        return
    devices = [place.devices.split(",") for place in found if place.devices]
    assert len(devices) == len(found) and count in (None, len(found))
    taken = [gpu for each in devices for gpu in each]
    assert len(set(taken)) == len(taken) <= gpus
    (degree,) = {len(each) for each in devices}
    assert tp in (None, degree)
    weights = 2 * model.shape.parameters / degree
    assert weights < USABLE * inventory.free


def test_known_models_get_as_many_services_as_fit() -> None:
    def count(model: ModelSizes, gpus: str, **asked: int) -> tuple[int, int]:
        found = placed(described(gpus), model, replace(ASKED, **asked), "sglang")
        return len(found), len((found[0].devices or "").split(","))

    assert count(SMALL, "8x24") == (8, 1)
    assert count(MIDDLE, "8x80") == (8, 1)
    assert count(LARGE, "8x80") == (4, 2)
    assert count(LARGE, "8x80", services=2) == (2, 2)
    assert count(LARGE, "8x141") == (8, 1)
    busy = described("8x80")
    busy = replace(busy, gpus=(replace(busy.gpus[0], free=GIB), *busy.gpus[1:]))
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=1,2,3,4,5,6,7 would, which leave"):
        placed(busy, MIDDLE, ASKED, "sglang")
    with pytest.raises(ConfigError, match=r"a service of 1 GPU.s. each for a model of .* not fit"):
        placed(described("8x24"), LARGE, replace(ASKED, inf_tp=1), "sglang")


def test_each_service_has_the_gpus_the_port_and_the_url_that_follow() -> None:
    argv = ["--model", str(MODEL), "--services", "auto", "--inf_tp_size", "2", "--inf_ep_size", "2",
            "--port", "31000", "--public_url", "http://node:31000"]  # fmt: skip
    arguments = serve_parser().parse(argv).own
    found = placed(described("4x80"), MIDDLE, replace(ASKED, inf_tp=2), "sglang")
    first, second = parts(argv, arguments, found, "sglang")
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    started = serve_parser().parse(second.command[4:]).own
    assert (started.services, started.port, started.inf_tp_size, started.inf_ep_size) == (
        1, 31001, 2, 2,
    )  # fmt: skip
    assert (started.public_url, started.inf_mem_ratio) == ("http://node:31001", USABLE)
    local, _ = parts(argv, arguments, placed(described("2x80"), SMALL, ASKED, "local"), "local")
    assert serve_parser().parse(local.command[4:]).own.device == "cuda"
    arguments.public_url = "http://node"
    with pytest.raises(ConfigError, match="--public_url http://node: give it with a port"):
        parts(argv, arguments, found, "sglang")


def test_without_gpus_there_are_as_many_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for given_, count in (("auto", 1), ("3", 3)):
        arguments = serve_parser().parse(["--model", str(MODEL), "--services", given_]).own
        assert [place.devices for place in places(arguments, "local")] == [None] * count


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_services_of_a_node_are_announced_restarted_and_end_together(
    mongod: EmbeddedMongod, tmp_path: Path
) -> None:
    database = await connect(mongod.url, f"services-{uuid4().hex[:8]}")
    port = free_port()
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "agentrl.cli", "serve", "--services", "2",
                "--model", str(MODEL), "--port", str(port), "--run_name", database.name,
                "--db_connection_string", mongod.url,
            ],
            stderr=output,
        )  # fmt: skip
    try:
        urls = [f"http://127.0.0.1:{port + number}" for number in range(2)]
        async with asyncio.timeout(120):
            while sorted(s.url for s in await live_services(database, 60.0)) != urls:
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.2)
        (dying,) = [
            pid
            for pid in descendants(process.pid)
            if (words := Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
            and str(port + 1).encode() in words
            and b"-I" not in words
        ]
        signal_pid(dying)
        async with asyncio.timeout(120):
            again = "service-1 was ended by SIGKILL: it is started again"
            while f"serving {MODEL} at {urls[1]}" not in log.read_text().partition(again)[2]:
                await asyncio.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while process.poll() is None:
                await asyncio.sleep(0.1)
        assert process.returncode == 0
        assert await live_services(database, 60.0) == []
    finally:
        process.kill()
        process.wait()
        await database.client.drop_database(database.name)
        await database.close()


def signal_pid(pid: int) -> None:
    """End a process as a machine without memory would."""
    subprocess.run(["kill", "-9", str(pid)], check=True)
