"""Holds random conversations in every model family:  python tests/fuzz/chat_families.py

Each conversation is held turn by turn, as a sampler does, and compared with the chat template
applied to the whole of it; every second one has results and questions full of control tokens, and
is compared with a twin of harmless words. Prints a line for each family: conversations,
continuations, and how many of them drifted, by reason. The first conversation that does not come
out as it must is printed and ends it with status 1; the last line is one JSON object.

    --conversations 1000   for each family
    --family NAME          only this one
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import orjson

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "tool_calls"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "chat"))

from conversations import fault_of, hold, hostile_text, make_talk
from families import BY_NAME, Family


def main() -> int:
    """Hold so many conversations in each family; exit status 1 if one is not exact."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--conversations", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--family", choices=sorted(BY_NAME))
    options = arguments.parse_args()
    began = time.monotonic()
    report: dict[str, dict[str, int]] = {}
    for family in BY_NAME.values():
        if options.family not in (None, family.name):
            continue
        counts: Counter[str] = Counter()
        for index in range(options.conversations):
            seed = f"{options.seed}-{index}"
            fault = examine(family, seed, index % 2 == 1, counts)
            if fault is not None:
                print(f"{family} with seed {seed}: {fault}")
                return 1
        report[family.name] = dict(counts)
        print(family, dict(counts), flush=True)
    total = sum((Counter(counts) for counts in report.values()), Counter())
    seconds = round(time.monotonic() - began, 1)
    summary = {"families": len(report), "seconds": seconds, **total, "by_family": report}
    print(orjson.dumps(summary).decode())
    return 0


def examine(family: Family, seed: str, hostile: bool, counts: Counter[str]) -> str | None:
    """Hold one conversation and count what happened; says what is wrong with it, if anything."""
    talk = make_talk(Random(seed), family, hostile_text(family) if hostile else ())
    held = hold(family, talk)
    counts["conversations"] += 1
    counts["tokens"] += len(held.ids)
    for next_prompt in held.next_prompts:
        counts["continuations"] += 1
        counts["restyled"] += next_prompt.restyled
        if next_prompt.drift is not None:
            counts["drifts"] += 1
            counts[f"drift_{next_prompt.drift.name.lower()}"] += 1
    return fault_of(family, talk, held)


if __name__ == "__main__":
    sys.exit(main())
