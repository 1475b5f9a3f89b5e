"""Runs a local engine in a separate process, with random Qwen3 models."""

import multiprocessing
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.inference.engine import EngineConfig, serve


def random_model(folder: Path, **sizes: Any) -> Qwen3ForCausalLM:
    """A model of these sizes with tied embeddings, also written to `folder`."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **sizes,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine."""

    url: str
    pid: int


@contextmanager
def engine_process(config: EngineConfig) -> Iterator[EngineProcess]:
    """The engine, until the block ends."""
    spawn = multiprocessing.get_context("spawn")
    receive, send = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_serve, args=(config, send))
    process.start()
    send.close()
    try:
        assert process.pid is not None
        yield EngineProcess(receive.recv(), process.pid)
    finally:
        process.terminate()
        process.join()


def _serve(config: EngineConfig, port: Connection) -> None:
    """Send the URL, then serve until terminated."""

    @asynccontextmanager
    async def tell(url: str) -> AsyncIterator[None]:
        port.send(url)
        yield

    serve(config, tell)
