"""Tokens per second of the local engine against left-padded `generate`, on the same load.

A random Qwen3 of half a million parameters, prompts of 40 to 150 tokens, 64 requests at once, one
torch thread for each side. The engine answers over HTTP with logprobs, its client in a process of
its own; `generate` takes batches of 64 in this process and returns tokens only. Two loads: "ragged"
asks for 10 to 40 tokens (a batch of `generate` goes on until its longest row has ended, and only
the tokens asked for count), "even" asks for 25 tokens of every row, where `generate` wastes none.
Prompts are random and new in each round, so the engine's prefix cache is of no help.

    python benchmarks/engine_rate.py [--quick] [--save]

Rounds of both sides are interleaved; the last line is a JSON object with the medians.
"""

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.inference.client import SGLangClient
from agentrl.inference.engine import EngineConfig, serve
from agentrl.inference.protocol import GenerateRequest, SamplingParams

CONCURRENCY = 64
VOCAB = 500
RESULTS = Path(__file__).parent / "results" / "engine_rate.json"

Load = list[tuple[list[int], int]]


def make_load(name: str, requests: int, seed: int) -> Load:
    """Prompts of 40 to 150 random ids, and how many tokens each is to get."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(2, VOCAB) for _ in range(rng.randint(40, 150))],
            rng.randint(10, 40) if name == "ragged" else 25,
        )
        for _ in range(requests)
    ]


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def run_engine(folder: Path, port: Connection) -> None:
    """The engine's process: tells its URL, then serves until it is terminated."""

    @asynccontextmanager
    async def tell(url: str) -> AsyncIterator[None]:
        port.send(url)
        yield

    serve(EngineConfig(folder, num_threads=1), tell)


async def engine_rate(url: str, load: Load) -> float:
    """Tokens per second with CONCURRENCY requests in flight until the load is done."""
    queue = iter(enumerate(load))
    tokens = 0

    async def worker(client: SGLangClient) -> None:
        nonlocal tokens
        for index, (ids, length) in queue:
            params = SamplingParams(max_new_tokens=length, ignore_eos=True)
            answer = await client.generate(GenerateRequest(f"r{index}", tuple(ids), params))
            assert len(answer.output_ids) == length
            tokens += length

    async with SGLangClient(url) as client:
        began = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(CONCURRENCY)))
        return tokens / (time.perf_counter() - began)


def generate_rate(model: PreTrainedModel, load: Load) -> float:
    """Tokens per second of left-padded batches of CONCURRENCY, in the load's order."""
    began = time.perf_counter()
    for start in range(0, len(load), CONCURRENCY):
        batch = load[start : start + CONCURRENCY]
        longest = max(len(ids) for ids, _ in batch)
        padded = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(padded)
        for row, (ids, _) in enumerate(batch):
            padded[row, longest - len(ids) :] = torch.tensor(ids)
            mask[row, longest - len(ids) :] = 1
        with torch.inference_mode():
            model.generate(
                input_ids=padded,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(length for _, length in batch),
            )
    return sum(length for _, length in load) / (time.perf_counter() - began)


def measure(folder: Path, url: str, rounds: int, requests: int) -> dict[str, dict[str, object]]:
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    for rate in (lambda x: asyncio.run(engine_rate(url, x)), lambda x: generate_rate(model, x)):
        rate(make_load("ragged", CONCURRENCY, seed=0))
    results: dict[str, dict[str, object]] = {}
    for name in ("ragged", "even"):
        engine, plain = [], []
        for round_ in range(rounds):
            load = make_load(name, requests, seed=1 + round_)
            engine.append(asyncio.run(engine_rate(url, load)))
            plain.append(generate_rate(model, load))
            print(f"{name} {round_}: engine {engine[-1]:.0f}, generate {plain[-1]:.0f} tokens/s")
        results[name] = {
            "engine_tokens_per_s": round(statistics.median(engine)),
            "generate_tokens_per_s": round(statistics.median(plain)),
            "ratio": round(statistics.median(e / p for e, p in zip(engine, plain, strict=True)), 2),
            "ratios": [round(e / p, 2) for e, p in zip(engine, plain, strict=True)],
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, < 60 s")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name} beside this")
    args = parser.parse_args()
    rounds, requests = (3, 192) if args.quick else (7, 512)
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        receive, send = spawn.Pipe(duplex=False)
        engine = spawn.Process(target=run_engine, args=(Path(folder), send))
        engine.start()
        send.close()
        try:
            loads = measure(Path(folder), receive.recv(), rounds, requests)
        finally:
            engine.terminate()
            engine.join()
    result = {
        "benchmark": "engine_rate",
        "ratio": loads["ragged"]["ratio"],
        "loads": loads,
        "concurrency": CONCURRENCY,
        "rounds": rounds,
        "requests_per_round": requests,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if args.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
