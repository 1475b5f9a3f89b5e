"""Answer schemas: where in a model's final text its answer stands.

    answer   the last <answer>...</answer>
    boxed    the last \\boxed{...} or \\fbox{...}, with nested braces

A task without a schema takes the whole text for the answer.
"""

import re
from collections.abc import Callable

_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def answer_tag(text: str) -> str | None:
    """What stands in the last closed `<answer>` element, stripped."""
    end = text.rfind(_ANSWER_CLOSE)
    start = text.rfind(_ANSWER_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    return text[start + len(_ANSWER_OPEN) : end].strip()


def boxed(text: str) -> str | None:
    r"""What stands in the last closed `\boxed{}` or `\fbox{}`. Escaped braces are text."""
    for box in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, box.end())
        if end is not None:
            return text[box.end() : end].strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """The place of the brace that closes the one before `start`."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace does not count
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


_SCHEMAS: dict[str, Callable[[str], str | None]] = {"answer": answer_tag, "boxed": boxed}
KNOWN_SCHEMAS = frozenset(_SCHEMAS)


def extract_answer(text: str, schema: str | None) -> str | None:
    """The answer in a model's final text, or None if it gives none in the form asked for.

    `schema`: a name of `KNOWN_SCHEMAS`; None takes the whole text. Raises ValueError for an
    unknown schema.
    """
    if schema is None:
        return text.strip()
    extract = _SCHEMAS.get(schema)
    if extract is None:
        raise ValueError(
            f"unknown answer_schema {schema!r}; known: {', '.join(sorted(KNOWN_SCHEMAS))}"
        )
    return extract(text)
