r"""The part of a longer text that is its answer.

    \boxed{...}, the last one, or several that stand side by side
    #### 72                          as in GSM8K
    ... the final answer is 72.
    the last mathematics between dollars
    the last number

The first of these that a text has decides. A short text without the first three is its own answer.
"""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN = re.compile(r"(?:\s|[$,;.]|\\[()\[\]]|\\text\{|\}|and|or)*", re.IGNORECASE)
_HASHES = re.compile(r"####\s*([^\n]+)")
_SAID = re.compile(
    r"(?:answer|result)(?:\s+is)?\s*(?:[:=]|(?<=is))\s*(?:\*\*)?\s*([^\n]+)", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<=[^\s.])[.!?](?=\s+[A-Z]|\s*$)")
_MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|\$([^$]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"[-\u2212+]?[$\u20ac\u00a3]?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:\s?%)?")
_CHOICE = re.compile(
    rf"({_NUMBER.pattern})((?:\s*,?\s*(?:or|and|,)\s*{_NUMBER.pattern})+)", re.IGNORECASE
)


def marked_answer(text: str) -> str | None:
    """The part of a text that is marked as its answer; None if there is none."""
    boxes = _boxes(text)
    if boxes:
        return boxes
    hashes = _HASHES.findall(text)
    if hashes:
        return str(hashes[-1]).strip()
    said = _SAID.findall(text)
    return _SENTENCE_END.split(said[-1], maxsplit=1)[0].strip() if said else None


def last_mathematics(text: str) -> str | None:
    """The last mathematics in prose, else the last number; None if there is neither."""
    found = _MATHEMATICS.findall(text)
    if found:
        return str(next(part for part in found[-1] if part)).strip()
    choices = list(_CHOICE.finditer(text))
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    if choices and choices[-1].end() == numbers[-1].end():
        return choices[-1][0]
    return numbers[-1][0]


def _boxes(text: str) -> str | None:
    """The contents of the last box and the boxes directly before it, joined by commas."""
    contents: list[str] = []
    begins = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, box.end())
        if end is None or end >= begins:  # unclosed, or around a box that was found before
            continue
        if contents and not _BETWEEN.fullmatch(text, end + 1, begins):
            break
        contents.insert(0, text[box.end() : end].strip())
        begins = box.start()
    return ", ".join(contents) or None


def _closing_brace(text: str, start: int) -> int | None:
    depth, place = 1, start
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return None
