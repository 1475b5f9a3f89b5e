"""How one local engine is started."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl.access import require_key

KEY_OF_SERVICES = (
    "put one into an environment variable, and name that with --inference_api_key_env here and in"
    " the runs"
)
Announcement = Callable[[str], AbstractAsyncContextManager[None]]
"""Entered with the engine's URL once it takes requests, left before it stops."""

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Arguments of `serve`.

    `model_path` is a Hugging Face folder (config.json, safetensors, a tokenizer if text is
    wanted). `port` 0 takes a free one. `context_length` None is the model's own maximum.
    At most `max_running_requests` generate at once; further ones wait in order. Keys and values
    of running and cached requests take at most `max_total_tokens` positions, None for what a
    quarter of the device's memory holds. `weight_version` is what tokens carry until the first
    update. `seed` draws for requests without a seed of their own. `num_threads` None leaves
    torch's number. `api_key` is what clients must show; raises `KeyNeeded` without one where other
    machines reach `host`.
    """

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    dtype: DType = "float32"
    context_length: int | None = None
    max_running_requests: int = 128
    max_total_tokens: int | None = None
    max_prefill_tokens: int = 4096
    weight_version: str = "default"
    seed: int = 0
    num_threads: int | None = None
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_key(self.host, self.api_key, KEY_OF_SERVICES)
