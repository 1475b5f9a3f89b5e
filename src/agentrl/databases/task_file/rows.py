"""A task file as a stream of rows. What the fields of a row mean is not known here.

.parquet        Parquet, read in batches: never as a whole beside what is made of it
anything else   JSON: a list of objects, or one object a line (JSONL), by its first character
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_BATCH_ROWS = 1024


class UnreadableFile(ValueError):
    """The file as a whole cannot be read. The message goes on after the file's name."""


@dataclass(frozen=True)
class Row:
    """One row.

    `number`: from 1 on. `unit`: what is counted, lines of text or rows of a list or table.
    `problem`: why there are no fields, if there are none.
    """

    number: int
    fields: dict[str, Any]
    problem: str | None = None
    unit: Literal["line", "row"] = "row"

    def place_in(self, path: Path) -> str:
        """Where it is, in the form that editors know for lines."""
        return f"{path}:{self.number}" if self.unit == "line" else f"{path} row {self.number}"


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file in its order. Raises UnreadableFile."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif _first_character(path) == "[":
            yield from _list_rows(path)
        else:
            yield from _line_rows(path)
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"is not UTF-8 text: {error}") from None


def _first_character(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if stripped := line.lstrip():
                return stripped[0]
    return ""


def _line_rows(path: Path) -> Iterator[Row]:
    # Lines end at line feeds only: U+2028 and its like may stand inside a JSON string.
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                yield Row(number, {}, f"not JSON: {error}", "line")
            else:
                yield _object_row(number, value, "line")


def _list_rows(path: Path) -> Iterator[Row]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UnreadableFile(f"begins like a JSON list and is none: {error}") from None
    for number, value in enumerate(values, start=1):
        yield _object_row(number, value, "row")


def _object_row(number: int, value: object, unit: Literal["line", "row"]) -> Row:
    if isinstance(value, dict):
        return Row(number, value, unit=unit)
    return Row(number, {}, f"not a JSON object but a {type(value).__name__}", unit)


def _parquet_rows(path: Path) -> Iterator[Row]:
    # Here, because it takes a while and few runs read Parquet.
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as opened, pyarrow.parquet.ParquetFile(opened) as table:
            number = 0
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(number, fields)
    except pyarrow.ArrowException as error:
        raise UnreadableFile(f"is no Parquet file that can be read: {error}") from None
