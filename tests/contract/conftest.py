"""One set of tests for every server with SGLang's API: the local engine, and SGLang itself.

Without more ado they run against the local engine. With `SGLANG_COMMAND` set, as
tests/run_sglang.sh does, they run against the server that it starts. Both are started the way a
user starts them: by `agentrl serve`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.databases.mongod import free_port
from agentrl.inference.client import SGLangClient

sys.path.insert(0, str(Path(__file__).parent))  # `asking`

ENGINE = "sglang" if "SGLANG_COMMAND" in os.environ else "local"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Folders:
    """Two sets of weights of one model, far apart; `first` is what services start with."""

    first: Path
    second: Path


@dataclass
class Service:
    """`agentrl serve` and where it answers."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def kill(self) -> None:
        """End it and all its children as a machine that fails would."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it in order; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@pytest.fixture(scope="session", params=[ENGINE])
def engine(request: pytest.FixtureRequest) -> str:
    """The engine under contract, also in the names of the tests."""
    return str(request.param)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The demo's model, and the same model with other weights."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(DEMO_MODEL, root / "first")
    shutil.copytree(DEMO_MODEL, root / "second")
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(DEMO_MODEL)).save_pretrained(root / "second")
    return Folders(root / "first", root / "second")


@pytest.fixture(scope="session")
def start_service(
    engine: str, folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Service]]:
    """Starts services; all of them end with the session."""
    started: list[Service] = []

    def start(*flags: str) -> Service:
        port = free_port()
        log = tmp_path_factory.mktemp("service") / "log"
        command = [
            sys.executable, "-m", "agentrl.cli", "serve", "--engine", engine,
            "--model", str(folders.first), "--port", str(port), "--dtype", "float32",
            "--max_running_requests", "16", *flags,
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        service = Service(process, f"http://127.0.0.1:{port}", log)
        started.append(service)
        _wait_until_ready(service)
        return service

    yield start
    for service in started:
        if service.process.poll() is None:
            service.process.send_signal(signal.SIGTERM)
    for service in started:
        try:
            service.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            service.kill()


def _wait_until_ready(service: Service) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{service.url}/ready", timeout=5):
                return
        except OSError:
            pass
        if service.process.poll() is not None or time.monotonic() > deadline:
            tail = service.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the service did not start; its log ends:\n{tail}")
        time.sleep(0.2)


@pytest.fixture(scope="session")
def reference(folders: Folders) -> Callable[..., list[float]]:
    """What a plain forward pass says: `(folder, prompt, output, temperature) -> logprobs`."""
    models = {
        f: Qwen3ForCausalLM.from_pretrained(f).eval() for f in (folders.first, folders.second)
    }

    def logprobs(
        folder: Path, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = models[folder](ids).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()

    return logprobs


@pytest.fixture(scope="session")
def service(start_service: Callable[..., Service]) -> Service:
    """The service that most tests share; it is idle, its weights may be any."""
    return start_service()


@pytest.fixture
async def client(service: Service, folders: Folders) -> AsyncIterator[SGLangClient]:
    """A client of the shared service, which has the first weights and an empty cache.

    It has learned the service's limits, as the pool's clients have.
    """
    async with SGLangClient(service.url) as client:
        await client.fetch_limits()
        await client.continue_()  # a test that failed may have left it paused
        await client.update_weights_from_disk(folders.first, await client.weight_version() + 1)
        yield client
        assert service.process.poll() is None, "the service died: see the test before"
