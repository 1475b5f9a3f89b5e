"""JSON as people read it, over several lines, with each literal as it was written.

The model saw the text, so nothing of it may be said otherwise: 1.10 stays 1.10, and two values of
one key stay two.
"""

import json
import re

_LONGEST = 200_000  # characters; a longer text stays as it is
_DEEPEST = 40  # levels, as indented lines get longer with each
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
_CLOSES = {"[": "]", "{": "}"}


def folded_json(value: object) -> str:
    """JSON over several lines. A text that is no object and no list is itself."""
    if not isinstance(value, str):
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    if value.lstrip()[:1] not in ("[", "{") or len(value) > _LONGEST:
        return value
    try:
        json.loads(value, object_pairs_hook=_once, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return value
    return _folded(value) or value


def _once(pairs: list[tuple[str, object]]) -> None:
    """Raises ValueError for an object that has a key twice, of which readers keep one."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key twice")


def _folded(text: str) -> str | None:
    """Sound JSON, folded; None if it is too deep."""
    pieces = _PIECE.findall(text)
    said: list[str] = []
    depth = 0
    for at, piece in enumerate(pieces):
        match piece:
            case "[" | "{":
                said.append(piece)
                if pieces[at + 1] != _CLOSES[piece]:
                    depth += 1
                    said.append("\n" + "  " * depth)
            case "]" | "}":
                if _CLOSES.get(pieces[at - 1]) != piece:
                    depth -= 1
                    said.append("\n" + "  " * depth)
                said.append(piece)
            case ",":
                said.append(",\n" + "  " * depth)
            case ":":
                said.append(": ")
            case _:
                said.append(piece)
        if depth > _DEEPEST:
            return None
    return "".join(said)
