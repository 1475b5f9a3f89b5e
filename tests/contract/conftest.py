"""Engines under contract: the local one, and SGLang itself.

Without more ado the tests run against the local engine. With `SGLANG_COMMAND` set, as
tests/run_sglang.sh does, they run against the server that it starts. Both are started the way a
user starts them, by `agentrl serve`; the local engine's is forked from a process that has the
libraries, which saves it seconds. What any engine must do is in
tests/inference/conformance.py and weight_conformance.py.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from forked import Forked, preload_training
from ports import free_port
from service_ready import wait_until_ready
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.inference.engine_protocol import Engine
from agentrl.inference.engines import engine_at
from agentrl.inference.protocol import ModelLimits

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))  # the conformance suite
pytest.register_assert_rewrite("conformance", "weight_conformance")

ENGINE = "sglang" if "SGLANG_COMMAND" in os.environ else "local"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"
START_TIMEOUT_S = 300.0
CAPACITY = 16
preload_training()


@dataclass(frozen=True)
class Folders:
    """Two sets of weights of one model, far apart; `first` is what services start with."""

    first: Path
    second: Path


@dataclass
class Service:
    """`agentrl serve` and where it answers."""

    process: subprocess.Popen[bytes] | Forked
    url: str
    log: Path

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

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
def engine_name(request: pytest.FixtureRequest) -> str:
    """The engine under contract, as `--engine` has it, also in the names of the tests."""
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
    engine_name: str, folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Service]]:
    """Starts services with the flags; all of them end with the session. `with_own_command`: the
    process has the command line that a user's would have."""
    started: list[Service] = []

    def start(*flags: str, with_own_command: bool = False) -> Service:
        port = free_port()
        log = tmp_path_factory.mktemp("service") / "log"
        command = [
            "-m", "agentrl.cli", "serve", "--engine", engine_name,
            "--model", str(folders.first), "--port", str(port), "--dtype", "float32",
            "--max_running_requests", str(CAPACITY), *flags,
        ]  # fmt: skip
        process: subprocess.Popen[bytes] | Forked
        if engine_name == "local" and not with_own_command:
            process = Forked(command, log=log)
        else:
            with log.open("wb") as output:
                process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output)
        service = Service(process, f"http://127.0.0.1:{port}", log)
        started.append(service)
        wait_until_ready(
            service.url,
            service.process,
            START_TIMEOUT_S,
            lambda: f"; its log ends:\n{service.tail()}",
        )
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


@pytest.fixture(scope="session")
def limits() -> ModelLimits:
    """What the demo's model accepts."""
    return ModelLimits(vocab_size=406, context_length=1024)


@pytest.fixture(scope="session")
def capacity() -> int:
    """How many requests services run at once."""
    return CAPACITY


@pytest.fixture(scope="session")
def distribution(folders: Folders) -> Callable[..., torch.Tensor]:
    """What a plain forward pass says: `(folder, prompt, output, temperature) -> [output, vocab]`,
    the logprobs of all tokens in place of each output token."""
    models = {
        f: Qwen3ForCausalLM.from_pretrained(f).eval() for f in (folders.first, folders.second)
    }

    def logprobs(
        folder: Path, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = models[folder](ids).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1)

    return logprobs


@pytest.fixture(scope="session")
def reference(distribution: Callable[..., torch.Tensor]) -> Callable[..., list[float]]:
    """The same of the output tokens alone."""

    def logprobs(
        folder: Path, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        every = distribution(folder, prompt, output, temperature)
        return every.gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()

    return logprobs


@pytest.fixture(scope="session")
def service(start_service: Callable[..., Service]) -> Service:
    """The service that most tests share; it is idle, its weights may be any."""
    return start_service("--enable_metrics")


@pytest.fixture
async def engine(service: Service, folders: Folders) -> AsyncIterator[Engine]:
    """The shared service, which has the first weights and an empty cache.

    Its limits are learned, as the pool learns them.
    """
    async with engine_at(service.url) as engine:
        await engine.fetch_limits()
        await engine.continue_()  # a test that failed may have left it paused
        await engine.update_weights_from_disk(folders.first, await engine.weight_version() + 1)
        yield engine
        assert service.process.poll() is None, "the service died: see the test before"
