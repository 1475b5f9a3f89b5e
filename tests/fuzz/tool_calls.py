"""Fuzzes the tool-call parsers:  python tests/fuzz/tool_calls.py --seconds 600 --seed 1

Each text is given to all parsers: calls as the families write them with pieces cut out, put in,
repeated or cut off, heaps of the families' marks, and long repetitions of short pieces. A parser
must not raise, must give what MongoDB can store, and must be done with a long text in time. Prints
the counts as it goes; the first text that breaks a parser is printed and ends it with status 1.
"""

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import bson
import orjson

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "tool_calls"))

from writers import MARKS, WRITERS, tools_for

from agentrl.rollout.tool_calls import PARSERS, ParsedCall

LONG = 100_000  # characters of a long repetition
LONG_SECONDS = 2.0  # of processor time for one; a parser takes some 0.1
PRINT_EVERY_S = 30.0


class BrokenError(Exception):
    """A parser did what it must not."""


def main() -> int:
    """Fuzz for so long; exit status 1 if a parser breaks."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=600)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    source = random.Random(options.seed)
    counts: Counter[str] = Counter()
    began = printed = time.monotonic()
    while (now := time.monotonic()) - began < options.seconds:
        if now - printed > PRINT_EVERY_S:
            printed = now
            print(f"{now - began:.0f} s {dict(counts)}", flush=True)
        text, tools, kind = make_text(source)
        counts[kind] += 1
        for name, parse in PARSERS.items():
            try:
                check(name, text, tools, counts, parse)
            except Exception as error:  # whatever it is, it is what is looked for
                print(f"{name} with a {kind} text: {type(error).__name__}: {error}")
                print(f"text: {text[:2000]!r}")
                return 1
    report: dict[str, Any] = {"seed": options.seed, "seconds": round(time.monotonic() - began, 1)}
    print(orjson.dumps(report | dict(counts)).decode())
    return 0


def check(
    name: str, text: str, tools: list[dict[str, Any]], counts: Counter[str], parse: Any
) -> None:
    """One text through one parser."""
    began = time.process_time()
    turn = parse(text, tools)
    spent = time.process_time() - began
    if len(text) >= LONG // 2 and spent > LONG_SECONDS:
        raise BrokenError(f"took {spent:.1f} s for {len(text)} characters")
    turn.content.encode()
    for call in turn.calls:
        if isinstance(call, ParsedCall):
            counts["calls"] += 1
            bson.encode(call.arguments)
            orjson.dumps(call.arguments)
            call.name.encode()
        else:
            counts["malformed"] += 1
            if not call.error or "\n" in call.error:
                raise BrokenError(f"{call.error!r} is not one sentence")


def make_text(source: random.Random) -> tuple[str, list[dict[str, Any]], str]:
    """A text, the tools it was written for, and of which kind it is."""
    calls = [
        ParsedCall(f"tool_{index}", make_value(source, 2, "object"))
        for index in range(source.randint(1, 3))
    ]
    tools = tools_for(calls) if source.random() < 0.5 else []
    kind = source.choices(("mutated", "cut", "marks", "long"), (60, 15, 23, 2))[0]
    if kind == "marks":
        return "".join(source.choices(MARKS, k=source.randint(0, 60))), tools, kind
    if kind == "long":
        unit = "".join(source.choices(MARKS, k=source.randint(1, 6)))
        head, tail = ("".join(source.choices(MARKS, k=source.randint(0, 3))) for _ in range(2))
        return head + unit * (LONG // len(unit)) + tail, tools, kind
    _, write = source.choice(WRITERS)
    text = "Some text.\n" * source.randint(0, 1) + write(calls) + "\nMore." * source.randint(0, 1)
    if kind == "cut":
        return text[: source.randint(0, len(text))], tools, kind
    for _ in range(source.randint(1, 6)):
        start = source.randint(0, len(text))
        end = min(len(text), start + source.randint(0, 20))
        middle = source.choice(("", text[start:end] * 2, source.choice(MARKS), chr_of(source)))
        text = text[:start] + middle + text[end:]
    return text, tools, kind


def make_value(source: random.Random, depth: int, kind: str | None = None) -> Any:
    """A JSON value."""
    kind = kind or source.choice(("null", "number", "string", "array", "object")[: 3 + 2 * depth])
    if kind == "object":
        return {
            f"key_{index}": make_value(source, depth - 1) for index in range(source.randint(0, 3))
        }
    if kind == "array":
        return [make_value(source, depth - 1) for _ in range(source.randint(0, 3))]
    if kind == "string":
        return "".join(
            source.choice((chr_of(source), source.choice(MARKS), "word"))
            for _ in range(source.randint(0, 4))
        )
    if kind == "number":
        return source.choice((True, 0, -7, 2**63 - 1, 2**64, 0.5, 1e300))
    return None


def chr_of(source: random.Random) -> str:
    """A character, of any plane; no half of one."""
    code = source.choice((source.randrange(128), source.randrange(0xD800), 0x1F600))
    return chr(code)


if __name__ == "__main__":
    sys.exit(main())
