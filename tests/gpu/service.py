"""The inference service of a check: a model's folder, and `agentrl serve` as a user starts it."""

import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from dtensor_bench import random_model
from machine import Machine, NotHere
from ports import free_port
from service_ready import wait_until_ready
from torch import nn
from transformers import AutoTokenizer

from agentrl.launcher.deployment import SGLANG_OF_SETUP, SGLANG_PYTHON

ROOT = Path(__file__).parents[2]
# A random model is near to the same distribution everywhere. This standard deviation of its logits
# gives it preferences, as a trained one has.
_PREFERENCE = 2.5
_START_S = {True: 150.0, False: 1200.0}  # on a GPU, and in the stand-in
_MEMORY = 0.3  # of a GPU, for weights and cache


@dataclass(frozen=True)
class Service:
    """A service that takes requests."""

    url: str
    process: psutil.Process

    def resident_bytes(self) -> int:
        """Host memory of all its processes."""
        every = [self.process, *self.process.children(recursive=True)]
        return sum(process.memory_info().rss for process in every)


def write_model(machine: Machine, name: str, seed: int) -> Path:
    """Write a random Qwen3 in bfloat16: 0.6B on a GPU, 2M in the stand-in.

    Seeds give models that are far apart: its head is no copy of the embedding, with which any model
    would repeat its last token, and its norms have values.
    """
    folder = machine.folder / name
    model = random_model(experts=False, large=machine.on_gpu, seed=seed, tied=False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    hidden = model.config.hidden_size
    nn.init.normal_(model.get_output_embeddings().weight, std=_PREFERENCE / math.sqrt(hidden))
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "assets" / "demo" / "model").save_pretrained(folder)
    return folder


def sglang_command(machine: Machine) -> str | None:
    """What starts SGLang here: SGLANG_COMMAND, or on a GPU what scripts/setup.sh has installed."""
    given = os.environ.get("SGLANG_COMMAND")
    if given or not machine.on_gpu:
        return given
    return SGLANG_OF_SETUP if SGLANG_PYTHON.exists() else None


def require_sglang(machine: Machine) -> str:
    """The command that starts SGLang. Raises `NotHere` without one."""
    command = sglang_command(machine)
    if command is None:
        how = (
            "source scripts/setup.sh sglang" if machine.on_gpu else "bash tests/run_sglang.sh FILE"
        )
        raise NotHere(f"needs SGLang: `{how}`, or set SGLANG_COMMAND")
    return command


@contextmanager
def serving(machine: Machine, folder: Path) -> Iterator[Service]:
    """Serve the folder on the first GPU for the time of the block: with SGLang if it is here.

    Raises `RuntimeError` if the service does not start; its own words are in the check's log.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "agentrl.cli", "serve", "--model", str(folder), "--port", str(port),
        "--max_running_requests", "16", "--context_length", "512", *_engine_flags(machine),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=_environment(machine))
    try:
        wait_until_ready(
            url,
            process,
            _START_S[machine.on_gpu],
            lambda: f": {shlex.join(map(str, process.args))}",
        )
        yield Service(url, psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=_START_S[machine.on_gpu])


def _engine_flags(machine: Machine) -> list[str]:
    command = sglang_command(machine)
    if command is not None:
        # Graphs would take longer to capture than a check takes.
        quick = f" --disable-cuda-graph --mem-fraction-static {_MEMORY}" if machine.on_gpu else ""
        dtype = "bfloat16" if machine.on_gpu else "float32"  # kernels of the stand-in
        saver = ["--memory_saver"] if machine.on_gpu else []
        return [
            "--engine", "sglang", "--sglang_command", command + quick, "--dtype", dtype, *saver,
        ]  # fmt: skip
    memory = ["--device", "cuda", "--inf_mem_ratio", str(_MEMORY)] if machine.on_gpu else []
    return ["--engine", "local", "--dtype", "bfloat16", *memory]


def _environment(machine: Machine) -> dict[str, str]:
    if not machine.on_gpu:
        return dict(os.environ)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return os.environ | {"CUDA_VISIBLE_DEVICES": first}


def engine_name(machine: Machine) -> str:
    """The engine that `serving` starts."""
    return "local" if sglang_command(machine) is None else "sglang"
