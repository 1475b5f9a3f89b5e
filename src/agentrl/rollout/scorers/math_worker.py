"""The child process of the scorer `math`: pairs of expressions in, whether they are equal out.

One JSON array `[model_answer, ground_truth]` a line on standard input, one of `true`, `false` and
`null` (the ground truth cannot be read) a line on standard output. Run by `math_verifier.py`, as a
script whose argument is the seconds that reading an expression, and comparing two, may take each.
"""

import json
import logging
import resource
import sys

from math_verify import parse, verify

MEMORY_BYTES = 4 * 2**30  # 9**9**9 written out would take all there is
_ENVIRONMENTS = ("$", "\\boxed", "\\(", "\\[", "\\begin")


def compare(model_answer: str, ground_truth: str, timeout_s: int) -> bool | None:
    """Whether two expressions are equal; None if the ground truth is none."""
    gold = read(ground_truth, timeout_s)
    if not gold:
        return None
    return bool(verify(gold, read(model_answer, timeout_s), timeout_seconds=timeout_s))


def read(text: str, timeout_s: int) -> list[object]:
    """What the library reads in a text; nothing if there is no mathematics in it.

    It looks for LaTeX in mathematical environments only and would read a bare `2\\sqrt{3}` as 2, so
    a text without any is put into one.
    """
    if not any(environment in text for environment in _ENVIRONMENTS):
        text = f"${text}$"
    return list(parse(text, parsing_timeout=timeout_s))


def main() -> None:
    """Answer until standard input is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)  # what the library cannot read is no news
    timeout_s = int(sys.argv[1])
    for line in sys.stdin:
        model_answer, ground_truth = json.loads(line)
        print(json.dumps(compare(model_answer, ground_truth, timeout_s)), flush=True)


if __name__ == "__main__":
    main()
