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

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from engine_process import engine_process, random_model
from report import finish, parse_flags
from transformers import PreTrainedModel

from agentrl.inference.client import SGLangClient
from agentrl.inference.engine import EngineConfig
from agentrl.inference.protocol import GenerateRequest, SamplingParams

CONCURRENCY = 64
VOCAB = 500

Load = list[tuple[list[int], int]]


def make_load(name: str, requests: int, seed: int) -> Load:
    """Prompts of 40 to 150 random ids, and the number of tokens to generate for each."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(2, VOCAB) for _ in range(rng.randint(40, 150))],
            rng.randint(10, 40) if name == "ragged" else 25,
        )
        for _ in range(requests)
    ]


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


def measure(
    model: PreTrainedModel, url: str, rounds: int, requests: int
) -> dict[str, dict[str, object]]:
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
    args = parse_flags(__doc__)
    rounds, requests = (3, 192) if args.quick else (7, 512)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_model(
            folder,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=VOCAB,
        )
        with engine_process(EngineConfig(folder, num_threads=1)) as url:
            loads = measure(model.eval(), url, rounds, requests)
    result = {
        "ratio": loads["ragged"]["ratio"],
        "loads": loads,
        "concurrency": CONCURRENCY,
        "rounds": rounds,
        "requests_per_round": requests,
    }
    finish("engine_rate", result, ("torch", "transformers"), save=args.save)


if __name__ == "__main__":
    main()
