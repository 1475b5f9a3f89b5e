"""The sides of `engine_rate`: ways to generate for the same prompts on one machine.

Every side samples at temperature 1 and returns the ids and logprobs of all requests. The two of
transformers run in this process, without HTTP; the two servers answer `SGLangClient`.
"""

import asyncio
import os
import shlex
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from engine_process import engine_process
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

from agentrl.held_port import HeldPort
from agentrl.inference.client import SGLangClient
from agentrl.inference.engine import EngineConfig
from agentrl.inference.protocol import GenerateRequest, SamplingParams
from agentrl.inference.sglang_server import SGLangConfig, sglang_command

_START_S = 300.0
_PAGE = 64  # positions of a page of the continuous batching's cache
_BATCH_TOKENS = 2048

Prompts = Sequence[Sequence[int]]
Output = tuple[Sequence[int], Sequence[float]]
"""The ids and logprobs of one request."""


class Side(ABC):
    """A way to generate. `processes` are those that take part beside this one."""

    processes: Sequence[psutil.Process] = ()

    @abstractmethod
    def generate(self, prompts: Prompts, new_tokens: int, at_once: int) -> list[Output]:
        """Generate `new_tokens` for each prompt, with `at_once` requests in flight."""

    def cached_tokens(self) -> int:
        """Prompt tokens of the last call that were in a cache. Those of transformers keep none."""
        return 0

    def cpu_s(self) -> float:
        """CPU seconds that all its processes have spent."""
        times = (process.cpu_times() for process in self.processes)
        return time.process_time() + sum(spent.user + spent.system for spent in times)


class Server(Side):
    """A server with SGLang's API: the local engine, or SGLang."""

    def __init__(self, url: str, pid: int) -> None:
        self._url = url
        root = psutil.Process(pid)
        self.processes = [root, *root.children(recursive=True)]
        self._cached = 0

    def cached_tokens(self) -> int:
        return self._cached

    def generate(self, prompts: Prompts, new_tokens: int, at_once: int) -> list[Output]:
        return asyncio.run(self._generate(prompts, new_tokens, at_once))

    async def _generate(self, prompts: Prompts, new_tokens: int, at_once: int) -> list[Output]:
        self._cached = 0
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        free = asyncio.Semaphore(at_once)

        async def one(client: SGLangClient, index: int) -> Output:
            async with free:
                request = GenerateRequest(f"r{index}", prompts[index], params)
                answer = await client.generate(request)
                self._cached += answer.cached_tokens
                return answer.output_ids, answer.output_logprobs

        async with SGLangClient(self._url) as client:
            return await asyncio.gather(*(one(client, index) for index in range(len(prompts))))


class PaddedGenerate(Side):
    """`generate` on left-padded batches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def generate(self, prompts: Prompts, new_tokens: int, at_once: int) -> list[Output]:
        outputs: list[Output] = []
        for start in range(0, len(prompts), at_once):
            batch = prompts[start : start + at_once]
            longest = max(len(ids) for ids in batch)
            padded = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(padded)
            for row, ids in enumerate(batch):
                padded[row, longest - len(ids) :] = torch.tensor(ids)
                mask[row, longest - len(ids) :] = 1
            answer = self._model.generate(
                input_ids=padded,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
            ids_BT = answer.sequences[:, longest:]
            logprobs_BTV = torch.stack(answer.logits, dim=1).log_softmax(-1)
            logprobs_BT = logprobs_BTV.gather(-1, ids_BT[..., None]).squeeze(-1)
            outputs += zip(ids_BT.tolist(), logprobs_BT.tolist(), strict=True)
        return outputs


class ContinuousBatching(Side):
    """transformers' continuous batching, with a cache that fits the load.

    Its manager is kept until `at_once` changes.
    """

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        self._model = model
        self._pages = -(-longest // _PAGE)  # of a request
        self._at_once = 0

    def generate(self, prompts: Prompts, new_tokens: int, at_once: int) -> list[Output]:
        if at_once != self._at_once:
            self._model.destroy_cached_continuous_batching_manager()
            self._at_once = at_once
        answers = self._model.generate_batch(
            [list(ids) for ids in prompts],
            GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new_tokens, eos_token_id=-1
            ),
            ContinuousBatchingConfig(
                page_size=_PAGE,
                num_blocks=self._pages * at_once,
                # Its mask has this many rows, and a column for each position of the cache.
                max_batch_tokens=_BATCH_TOKENS,
                max_requests_per_batch=at_once,
                return_logprobs=True,
            ),
            persistent_manager=True,
        )
        return [(answer.generated_tokens, answer.logprobs) for answer in answers.values()]


@contextmanager
def all_sides(model_path: Path, longest: int, at_once: int) -> Iterator[dict[str, Side]]:
    """All sides, for requests of at most `longest` tokens; SGLang if `SGLANG_COMMAND` starts it."""
    padded, paged = (
        AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="sdpa").eval()
        for _ in range(2)
    )
    config = EngineConfig(model_path, num_threads=1, max_running_requests=at_once)
    with engine_process(config) as engine:
        sides: dict[str, Side] = {
            "engine": Server(engine.url, engine.pid),
            "generate": PaddedGenerate(padded),
            "continuous_batching": ContinuousBatching(paged, longest),
        }
        if "SGLANG_COMMAND" not in os.environ:
            yield sides
            return
        with _sglang(model_path, longest, at_once) as sglang:
            yield {**sides, "sglang": sglang}


@contextmanager
def _sglang(model_path: Path, longest: int, at_once: int) -> Iterator[Server]:
    """SGLang's server with the arguments that `agentrl serve` gives, until the block ends."""
    with HeldPort() as port:
        config = SGLangConfig(
            model_path,
            "127.0.0.1",
            port.number,
            launch=tuple(shlex.split(os.environ["SGLANG_COMMAND"])),
            dtype="float32",
            max_running_requests=at_once,
        )
        # Without --sleep-on-idle its scheduler takes a core while the other sides are measured.
        flags = ["--sleep-on-idle", "--max-total-tokens", str(2 * longest * at_once)]
        process = subprocess.Popen(
            [*sglang_command(config), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        try:
            asyncio.run(_until_ready(config.url, process))
            yield Server(config.url, process.pid)
        finally:
            process.terminate()
            process.wait()


async def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with SGLangClient(url) as client, asyncio.timeout(_START_S):
        while not await client.ready():
            if process.poll() is not None:
                raise RuntimeError(f"SGLang ended with status {process.returncode}")
            await asyncio.sleep(0.5)
