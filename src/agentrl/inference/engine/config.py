"""The configuration of a local engine."""

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

    model_path: Hugging Face folder (config.json, safetensors, and a tokenizer for text prompts)
    port: 0 takes a free one
    context_length: None means the model's maximum
    max_running_requests: requests that generate at once; further ones wait in order
    max_total_tokens: positions of the KV cache; None means a quarter of the device's memory
    memory_fraction: share of a GPU's free memory for weights and KV cache, if max_total_tokens is
        None
    max_prefill_tokens: prompt tokens of one step
    weight_version: version of the tokens until the first weight update
    seed: for requests that have none
    num_threads: None keeps torch's number
    fp32_head: whether the head computes in float32, whatever `dtype` is
    enable_metrics: whether /metrics answers Prometheus, to everyone who reaches the port
    api_key: key that clients must show

    Raises `KeyNeeded` without a key if other machines reach `host`.
    """

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    dtype: DType = "float32"
    context_length: int | None = None
    max_running_requests: int = 128
    max_total_tokens: int | None = None
    memory_fraction: float | None = None
    max_prefill_tokens: int = 4096
    weight_version: str = "default"
    seed: int = 0
    num_threads: int | None = None
    fp32_head: bool = False
    enable_metrics: bool = False
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_key(self.host, self.api_key, KEY_OF_SERVICES)
