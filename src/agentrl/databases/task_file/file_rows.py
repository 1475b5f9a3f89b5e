"""A task file as a stream of rows. The meaning of the fields is in `task_line.py`.

.parquet        Parquet, read in batches, so that the table is never in memory as a whole
anything else   JSON: a list of objects, or one object a line (JSONL), by its first character
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

BATCH_ROWS = 1024
_LEVELS = 100  # MongoDB's limit of nesting
_DIGITS = 4300  # Python's limit for converting text to an integer
_TEXT = "utf-8-sig"  # UTF-8 with or without a byte order mark


class UnreadableFile(ValueError):
    """The whole file cannot be read. The message continues a sentence after the file's name."""


@dataclass(frozen=True)
class Row:
    """One row of a task file.

    `number`: counted from 1, in lines of text or in rows of a list or table (`unit`). `problem`:
    why `fields` is empty; None if the row is good.
    """

    number: int
    fields: dict[str, Any]
    problem: str | None = None
    unit: Literal["line", "row"] = "row"

    def place_in(self, path: Path) -> str:
        """The row's place: `path:number` for lines, which editors can open."""
        return f"{path}:{self.number}" if self.unit == "line" else f"{path} row {self.number}"


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file in order. Raises UnreadableFile."""
    try:
        if is_table(path):
            yield from _parquet_rows(path)
        elif is_list(path):
            yield from _list_rows(path)
        else:
            yield from _line_rows(path)
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"is not UTF-8 text: {error}") from None


def is_table(path: Path) -> bool:
    """Whether the file is Parquet, by its name."""
    return path.suffix == ".parquet"


def is_list(path: Path) -> bool:
    """Whether the file is one JSON list, by its first character."""
    with path.open(encoding=_TEXT, errors="replace") as file:
        for line in file:
            if stripped := line.lstrip():
                return stripped[0] == "["
    return False


def _line_rows(path: Path) -> Iterator[Row]:
    # Only line feeds end a line: a JSON string may contain U+2028 and similar characters.
    with path.open(encoding=_TEXT, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield line_row(number, line)


def line_row(number: int, line: str) -> Row:
    """The row of a JSONL line."""
    try:
        value = _parse(line)
    except json.JSONDecodeError as error:
        return Row(number, {}, f"not JSON: {error}", "line")
    except ValueError as error:
        return Row(number, {}, str(error), "line")
    return _object_row(number, value, "line")


def _list_rows(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding=_TEXT)
    try:
        values = _parse(text)
    except json.JSONDecodeError as error:
        raise UnreadableFile(f"begins like a JSON list but is not one: {error}") from None
    except ValueError as error:
        raise UnreadableFile(str(error)) from None
    assert isinstance(values, list)  # the text begins with "["
    for number, value in enumerate(values, start=1):
        yield _object_row(number, value, "row")


def _object_row(number: int, value: object, unit: Literal["line", "row"]) -> Row:
    if isinstance(value, dict):
        return _row(number, value, unit)
    return Row(number, {}, f"not a JSON object but a {type(value).__name__}", unit)


def _parse(text: str) -> object:
    """The value of a JSON text. Raises JSONDecodeError or another ValueError."""
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError(f"nests deeper than {_LEVELS} levels") from None


def parse_inner(text: str) -> object:
    """The value of a JSON text that a row holds, under the rules for rows. Raises ValueError."""
    value = _parse(text)
    for problem in _unkeepable({"a text": value}):
        raise ValueError(problem)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, which is not a JSON number: write null, or leave it out")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"holds {digits[:40]}, more than a number can hold: write it as a text")
    return number


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a key that stands in it twice, json would keep the last value and say
    nothing."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key, count in counts.items() if count > 1)
        raise ValueError(
            f"holds the key {key[:80]!r} {counts[key]} times in one object: keep one of them"
        )
    return fields


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"holds a whole number of {len(digits)} digits, which is too long")
    return int(digits)


# Made once: to make it takes three times as long as to read a line with it. The checks take 2 of
# 9 microseconds a line.
_JSON = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_int=_integer,
    parse_float=_finite,
    object_pairs_hook=_without_doubles,
)


def table_row(number: int, fields: dict[str, Any]) -> Row:
    """The row of a table's row."""
    return _row(number, fields, "row")


def _row(number: int, fields: dict[str, Any], unit: Literal["line", "row"]) -> Row:
    """A row with these fields, or with a `problem` if the database cannot store them."""
    problems = list(_unkeepable(fields))
    return Row(number, {} if problems else fields, "; ".join(problems) or None, unit)


def _unkeepable(fields: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on fields that are nested too deeply or contain lone surrogates."""
    for name, value in fields.items():
        said = name.encode(errors="backslashreplace").decode()
        texts = [name]
        level, here = 1, [value]
        while here and level <= _LEVELS:  # no recursion: deep nesting would exceed its limit
            texts += [each for each in here if isinstance(each, str)]
            within = [each for each in here if isinstance(each, dict)]
            texts += [key for each in within for key in each]
            here = [inner for each in within for inner in each.values()] + [
                inner for each in here if isinstance(each, list | tuple) for inner in each
            ]
            level += 1
        if here:
            yield f"`{said}` nests deeper than {_LEVELS} levels"
        if not all(map(_is_unicode, texts)):
            yield f"`{said}` holds half a character (a lone surrogate, \\ud800 to \\udfff)"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet_rows(path: Path) -> Iterator[Row]:
    # Imported here: the import is slow, and few runs read Parquet.
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as opened, pyarrow.parquet.ParquetFile(opened) as table:
            number = 0
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield table_row(number, fields)
    except pyarrow.ArrowException as error:
        raise UnreadableFile(f"is not a readable Parquet file: {error}") from None
