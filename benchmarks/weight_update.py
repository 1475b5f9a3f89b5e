"""Pause of generation by a weight update: disk, broadcast and shared memory, each with both pauses.

One local engine serves a random Qwen3 of 13 million parameters in float32 (52 MB) in a process of
its own, one torch thread, and always has 8 requests in flight. Six kinds of updates take turns, so
that what else the machine does meets all alike. For each: the stall (from the order to pause until
the service says that generation goes on, as a run's metrics have it), and the gap (the longest time
without a token from the service, as its counter shows it: with "retract" the keys and values of
running requests are computed again in it).

    python benchmarks/weight_update.py [--quick] [--save]

The last line is a JSON object with the medians in seconds.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch
from engine_process import engine_process, random_model
from report import finish, parse_flags
from transformers import Qwen3ForCausalLM

from agentrl.inference.client import SGLangClient
from agentrl.inference.engine import EngineConfig
from agentrl.inference.protocol import GenerateRequest, SamplingParams
from agentrl.inference.weights.updates import PublishedWeights, UpdatePause, update_services
from agentrl.inference.weights.ways import make_updater

IN_FLIGHT = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 200
STEPS_BETWEEN = 15  # before and after an update, so that all of it is seen
WAYS = ("disk", "distributed", "tensor")
PAUSES: tuple[UpdatePause, ...] = ("retract", "in_place")


def trained_weights(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """The trainer's weights, with tied ones once."""
    tied = model.all_tied_weights_keys
    return {name: t for name, t in model.state_dict().items() if name not in tied}


class Watch:
    """The longest time between two tokens of a service, as its counter shows it."""

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self._moved = asyncio.Condition()
        self.longest = 0.0

    async def run(self) -> None:
        tokens, last = -1, time.monotonic()
        while True:
            info = await self._client.server_info()
            now, seen = time.monotonic(), info["internal_states"][0]["generated_tokens"]
            if seen != tokens:
                self.longest = max(self.longest, now - last)
                tokens, last = seen, now
                async with self._moved:
                    self._moved.notify_all()
            await asyncio.sleep(0.002)

    async def see(self, steps: int) -> None:
        """Wait until the counter has changed `steps` times."""
        for _ in range(steps):
            async with self._moved:
                await self._moved.wait()


async def load(client: SGLangClient, worker: int) -> None:
    """One request after the other, for ever."""
    params = SamplingParams(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompt = tuple((worker * 97 + i * 31) % 8192 for i in range(PROMPT_TOKENS))
    for number in range(1_000_000):
        await client.generate(GenerateRequest(f"{worker}-{number}", prompt, params))


async def measure(
    url: str, folder: Path, tensors: dict[str, torch.Tensor], rounds: int
) -> dict[str, dict[str, float]]:
    stalls: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    updaters = {way: make_updater(way, torch.device("cpu")) for way in WAYS}
    version = 0
    async with SGLangClient(url) as client, SGLangClient(url) as watching:
        watch = Watch(watching)
        tasks = [asyncio.create_task(load(client, worker)) for worker in range(IN_FLIGHT)]
        tasks.append(asyncio.create_task(watch.run()))
        for round_ in range(rounds + 1):
            for way in WAYS:
                for pause in PAUSES:
                    version += 1
                    await watch.see(STEPS_BETWEEN)
                    watch.longest = 0.0
                    weights = PublishedWeights(version, folder, tensors)
                    (outcome,) = await update_services(updaters[way], [client], weights, pause)
                    assert outcome.ok, outcome.error
                    await watch.see(STEPS_BETWEEN)
                    for task in tasks:
                        if task.done():
                            task.result()
                    if round_ == 0:
                        continue  # groups meet, shared memory is set up
                    name = f"{way}_{pause}"
                    stalls.setdefault(name, []).append(outcome.stall_s)
                    gaps.setdefault(name, []).append(watch.longest)
                    print(
                        f"round {round_}: {way}, {pause}: stall {outcome.stall_s:.3f} s,"
                        f" gap {watch.longest:.3f} s",
                        flush=True,
                    )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        name: {
            "stall_s": round(statistics.median(stalls[name]), 3),
            "stall_s_max": round(max(stalls[name]), 3),
            "gap_s": round(statistics.median(gaps[name]), 3),
        }
        for name in stalls
    }


def main() -> None:
    args = parse_flags(__doc__)
    rounds = 3 if args.quick else 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_model(
            folder,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=8192,
        )
        tensors = trained_weights(model)
        config = EngineConfig(folder, num_threads=1, max_running_requests=IN_FLIGHT)
        with engine_process(config) as engine:
            updates = asyncio.run(measure(engine.url, folder, tensors, rounds))
    result = {
        "updates": updates,
        "megabytes": round(sum(t.nbytes for t in tensors.values()) / 1e6),
        "in_flight": IN_FLIGHT,
        "rounds": rounds,
    }
    finish("weight_update", result, ("torch",), save=args.save)


if __name__ == "__main__":
    main()
