"""A service with a key: who shows it may do everything, all others nothing, and nobody reads it."""

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from conformance import ask
from weight_conformance import publish

from agentrl.inference.engines import engine_at, open_engines
from agentrl.inference.pool import ServicePool
from agentrl.inference.protocol import KeyRefused, ServiceUnreachable
from agentrl.inference.weights.ways import make_updater

KEY = "a-key/with#odd@signs%25"
PROMPT = tuple(range(30, 50))
CLOSED = (
    "/generate", "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache",
    "/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk",
    "/begin_weight_update", "/end_weight_update", "/update_weights_from_tensor",
    "/init_weights_update_group", "/destroy_weights_update_group",
    "/update_weights_from_distributed", "/model_info", "/server_info", "/v1/loads",
)  # fmt: skip
OPEN = ("/ready", "/health")


def command_lines(process: int) -> str:
    """Those of a process and all its descendants."""
    family = psutil.Process(process)
    return " ".join(" ".join(p.cmdline()) for p in [family, *family.children(recursive=True)])


@pytest.fixture(scope="module")
def closed(start_service: Callable):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVICE_KEY", KEY)
        return start_service("--inference_api_key_env", "SERVICE_KEY", with_own_command=True)


async def test_without_the_key_nothing_is_answered_and_nothing_is_changed(closed) -> None:
    async with aiohttp.ClientSession() as session:
        for wrong in (None, "Bearer", "Bearer other", f"Basic {KEY}", KEY, f"Bearer {KEY}x"):
            headers = {} if wrong is None else {"Authorization": wrong}
            for path in CLOSED:
                for method in ("GET", "POST"):
                    url = closed.url + path
                    async with session.request(method, url, json={}, headers=headers) as answer:
                        # A router may look at the method first.
                        assert answer.status in (401, 405), (wrong, method, path)
        for path in OPEN:
            async with session.get(closed.url + path) as answer:
                assert answer.status == 200
    async with engine_at(closed.url, "other") as stranger:
        assert not await stranger.ready()
        with pytest.raises(KeyRefused, match="--inference_api_key_env"):
            await stranger.generate(ask(PROMPT, 4))


async def test_the_key_opens_the_pool_and_all_ways_of_publication(closed, folders) -> None:
    for version, way in enumerate(("disk", "distributed", "tensor"), start=11):
        updater = make_updater(way, torch.device("cpu"))
        async with open_engines([closed.url]) as [stranger]:
            outcome = await publish(stranger, folders.second, version, updater)
            assert not outcome.ok and "401" in str(outcome.error)
        async with open_engines([closed.url], KEY) as [engine]:
            assert await engine.weight_version() != version
            outcome = await publish(engine, folders.second, version, updater)
            assert outcome.ok, outcome.error
            assert await engine.weight_version() == version
        await updater.close()
    async with ServicePool(api_key=KEY) as pool:
        pool.update([closed.url])
        await pool.wait_ready(10)
        answer = await pool.generate(ask(PROMPT, 20), record_id="r")
        assert (await pool.loads())[closed.url].total_tokens > 0
    assert [span.version for span in answer.versions] == [13]


async def test_a_pool_with_another_key_waits_for_a_service_that_takes_it(closed) -> None:
    async with ServicePool(api_key="old", patience_s=1.0) as pool:
        pool.update([closed.url])
        with pytest.raises(ServiceUnreachable, match=r"answered 401.*--inference_api_key_env"):
            await pool.generate(ask(PROMPT, 4), record_id="r")


def test_the_key_is_in_no_process_list_and_no_log(closed) -> None:
    assert KEY not in command_lines(closed.process.pid)
    assert "SERVICE_KEY" in command_lines(closed.process.pid)
    assert KEY not in closed.log.read_text(errors="replace")


async def test_a_service_that_others_reach_is_refused_without_a_key(
    engine_name: str, folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERVICE_KEY", raising=False)
    for flags, said in (
        ([], "--host 0.0.0.0: other machines reach the server there, so it needs a key"),
        (["--inference_api_key_env", "SERVICE_KEY"], "variable SERVICE_KEY is not set"),
        (["--inference_api_key_env", "sk-12/3"], "must be the name of an environment variable"),
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentrl.cli", "serve", "--engine", engine_name,
            "--model", str(folders.first), "--host", "0.0.0.0", "--port", str(port), *flags,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, error = await process.communicate()
        assert process.returncode == 2
        assert said in error.decode()
        assert len(error.decode().strip().splitlines()) == 1
