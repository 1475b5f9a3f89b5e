"""Answer schemas: where in a model's final text its answer stands.

    answer   the last <answer>...</answer>
    boxed    the last \\boxed{...} or \\fbox{...}, with nested braces

A task without a schema takes the whole text for the answer, unless the run has an
`--answer_schema`; the model is then told the form of the answer (`INSTRUCTIONS`).
"""

import re
from collections.abc import Callable

_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace, or an escaped character


def answer_tag(text: str) -> str | None:
    """The stripped text of the last closed `<answer>` element; None if there is none."""
    end = text.rfind(_ANSWER_CLOSE)
    start = text.rfind(_ANSWER_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    return text[start + len(_ANSWER_OPEN) : end].strip()


def boxed(text: str) -> str | None:
    r"""The stripped text of the last closed `\boxed{}` or `\fbox{}`; None if there is none.

    Escaped braces are text. Takes linear time.
    """
    boxes = {box.end() for box in _BOX.finditer(text)}
    if not boxes:
        return None
    last: tuple[int, int] | None = None  # start and end of the last closed box so far
    opened: list[int] = []
    for brace in _BRACE.finditer(text, min(boxes) - 1):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            begin = opened.pop()
            if begin in boxes and (last is None or begin > last[0]):
                last = (begin, brace.start())
    return None if last is None else text[last[0] : last[1]].strip()


_SCHEMAS: dict[str, Callable[[str], str | None]] = {"answer": answer_tag, "boxed": boxed}
KNOWN_SCHEMAS = frozenset(_SCHEMAS)
INSTRUCTIONS = {
    "answer": "Work on the user's question step by step, with the tools that you have. When you "
    "know the answer, write it between <answer> and </answer>, and nothing else between them.",
    "boxed": "Work on the user's question step by step, with the tools that you have. When you "
    r"know the answer, write it as \boxed{...}, and nothing else in the box.",
}


def extract_answer(text: str, schema: str | None) -> str | None:
    """The answer in a model's final text; None if the text has none in this schema.

    `schema`: a name in `KNOWN_SCHEMAS`; None: the whole text is the answer. Raises ValueError for
    an unknown schema.
    """
    if schema is None:
        return text.strip()
    extract = _SCHEMAS.get(schema)
    if extract is None:
        raise ValueError(
            f"unknown answer_schema {schema!r}; known: {', '.join(sorted(KNOWN_SCHEMAS))}"
        )
    return extract(text)
