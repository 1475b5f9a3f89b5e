"""Tokens per second of the local engine and of its peers on the same CPU, model and prompts.

The demo's model, random prompts of 100 to 300 tokens, 32 new tokens each whatever they are, sampled
at temperature 1, with logprobs. At 1, 16, 64 and 128 at once, and at 64 of which one has 900 tokens
(`engine_peers.py`):

    engine               over HTTP with streamed answers, its client in this process
    generate             left-padded batches of transformers' `generate`, in this process
    continuous_batching  transformers' `generate_batch`, in this process
    sglang               as the engine, if `SGLANG_COMMAND` starts it (see tests/run_sglang.sh)

    python benchmarks/engine_rate.py [--quick] [--save]

Every side has one torch thread. All new tokens are asked for of all rows, so that `generate` wastes
none on rows that have ended. Prompts are new in each round of each case. A round in which a server
reports more than a hundredth of its prompts' tokens as cached is an error: random prompts share a
token at times. Rounds are interleaved; the last line is a JSON object with medians: tokens per
second, CPU seconds of all processes of a side (with the client) per 1,000 tokens, and
`engine_over_best`, the engine's rate over that of the fastest peer.
"""

import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from engine_peers import Side, all_sides
from report import finish, parse_flags

MODEL = Path(__file__).parents[1] / "assets" / "demo" / "model"
VOCAB = 400
SHORTEST, LONGEST, NEW_TOKENS = 100, 300, 32
MOST_CACHED = 0.01  # of a round's prompt tokens


@dataclass(frozen=True)
class Case:
    """What is asked for: `requests` in a round, `at_once` of them in flight. `longest`: tokens of
    the first prompt; None if it is like the others."""

    at_once: int
    requests: int
    longest: int | None = None


CASES = {
    "1": Case(1, 8),
    "16": Case(16, 32),
    "64": Case(64, 64),
    "64_skewed": Case(64, 64, longest=900),
    "128": Case(128, 128),
}


def make_prompts(name: str, case: Case, round_: int) -> list[list[int]]:
    """Random ids, of random lengths. No round of a case has prompts of another."""
    rng = random.Random(f"{name} {round_}")
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(case.requests)]
    lengths[0] = case.longest or lengths[0]
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def measure(side: Side, prompts: list[list[int]], at_once: int) -> tuple[float, float]:
    """Tokens per second, and CPU seconds per 1,000 tokens."""
    cpu, began = side.cpu_s(), time.perf_counter()
    outputs = side.generate(prompts, NEW_TOKENS, at_once)
    wall_s, cpu_s = time.perf_counter() - began, side.cpu_s() - cpu
    assert len(outputs) == len(prompts)
    assert all(len(ids) == len(logprobs) == NEW_TOKENS for ids, logprobs in outputs)
    cached, asked = side.cached_tokens(), sum(len(ids) for ids in prompts)
    assert cached <= MOST_CACHED * asked, f"{cached} of {asked} prompt tokens were cached"
    tokens = NEW_TOKENS * len(prompts)
    return tokens / wall_s, 1000 * cpu_s / tokens


def compare(sides: dict[str, Side], name_of_case: str, rounds: int) -> dict[str, object]:
    """Medians of interleaved rounds, after one that warms up."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    costs: dict[str, list[float]] = {name: [] for name in sides}
    case = CASES[name_of_case]
    for round_ in range(rounds + 1):
        prompts = make_prompts(name_of_case, case, round_)
        for name, side in sides.items():
            rate, cost = measure(side, prompts, case.at_once)
            if round_:
                rates[name].append(rate)
                costs[name].append(cost)
    rate_of = {name: statistics.median(values) for name, values in rates.items()}
    best = max((name for name in sides if name != "engine"), key=rate_of.__getitem__)
    over = [ours / peer for ours, peer in zip(rates["engine"], rates[best], strict=True)]
    result = {
        "tokens_per_s": {name: round(rate) for name, rate in rate_of.items()},
        "cpu_s_per_1000_tokens": {
            name: round(statistics.median(values), 3) for name, values in costs.items()
        },
        "best_peer": best,
        "engine_over_best": round(statistics.median(over), 2),
        "engine_over_best_of_rounds": [round(value, 2) for value in over],
    }
    print(f"{name_of_case} at once: {result}", flush=True)
    return result


def main() -> None:
    args = parse_flags(__doc__ or "")
    torch.set_num_threads(1)
    rounds = 1 if args.quick else 3
    with all_sides(
        MODEL, LONGEST + NEW_TOKENS, max(case.at_once for case in CASES.values())
    ) as sides:
        results = {name: compare(sides, name, rounds) for name in CASES}
    result = {
        **{f"engine_over_best_{n}": results[n]["engine_over_best"] for n in CASES},
        "at_once": results,
        "cases": {name: asdict(case) for name, case in CASES.items()},
        "rounds": rounds,
        "prompt_tokens": [SHORTEST, LONGEST],
        "new_tokens": NEW_TOKENS,
    }
    finish("engine_rate", result, ("torch", "transformers"), save=args.save)


if __name__ == "__main__":
    main()
