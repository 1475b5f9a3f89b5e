"""A tiny model with its tokenizer, and real engines over it in processes of their own."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked import Forked, preload_training
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.inference.protocol import Generation

EOS, PAD = 257, 256
preload_training()

_SERVE = """
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from agentrl.inference.engine import EngineConfig, serve

@asynccontextmanager
async def announce(url):
    print(url, flush=True)
    yield

config = EngineConfig(
    Path(sys.argv[1]), port=int(sys.argv[2]), num_threads=1, max_running_requests=16
)
serve(config, announce)
"""


@dataclass(frozen=True)
class Folders:
    """Two sets of weights of one model, far apart; `first` is what engines start with."""

    first: Path
    second: Path


@dataclass
class EngineProcess:
    """An engine's process and where it answers."""

    process: Forked
    url: str

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0..255 are bytes; two special tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def logprob_error(folders: dict[int, Path], prompt: Sequence[int], made: Generation) -> float:
    """The largest difference of a generation's logprobs from what a plain forward pass of the
    version that each token carries says."""
    ids = torch.tensor([[*prompt, *made.output_ids]])
    expected = {}
    for version, folder in folders.items():
        model = Qwen3ForCausalLM.from_pretrained(folder).eval()
        with torch.inference_mode():
            all_logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected[version] = all_logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return max(
        abs(made.output_logprobs[i] - expected[span.version][i])
        for span in made.versions
        for i in range(span.start, span.end)
    )


@pytest.fixture(scope="session")
def error() -> Callable[[dict[int, Path], Sequence[int], Generation], float]:
    """`logprob_error`, for test modules, which cannot import this one."""
    return logprob_error


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=264,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    return Folders(root / "first", root / "second")


@pytest.fixture(scope="session")
def start_engine(folders: Folders) -> Iterator[Callable[[int], EngineProcess]]:
    """Starts engines; all of them end with the session."""
    started: list[EngineProcess] = []

    def start(port: int = 0) -> EngineProcess:
        process = Forked(["-c", _SERVE, str(folders.first), str(port)], piped=True)
        engine = EngineProcess(process, "")
        started.append(engine)
        assert process.stdout is not None
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        engine.url = process.stdout.readline().strip()
        watchdog.cancel()
        assert engine.url, "the engine did not start"
        return engine

    yield start
    for engine in started:
        if engine.process.poll() is None:
            engine.process.send_signal(signal.SIGTERM)
    for engine in started:
        try:
            engine.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            engine.kill()


@pytest.fixture(scope="session")
def spares() -> list[EngineProcess]:
    """Engines for `spare`, the last of which may live."""
    return []


@pytest.fixture
def spare(
    start_engine: Callable[[int], EngineProcess], spares: list[EngineProcess]
) -> Iterator[EngineProcess]:
    """An engine that a test may stop or kill; who leaves it alive leaves it idle."""
    if not spares or spares[-1].process.poll() is not None:
        spares.append(start_engine(0))
    yield spares[-1]
    if spares[-1].process.poll() is None:
        spares[-1].process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def engine(start_engine: Callable[[int], EngineProcess]) -> EngineProcess:
    """The engine that most tests share; its weights may be any, its state is idle."""
    return start_engine(0)
