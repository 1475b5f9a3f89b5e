"""Files of trajectories for Hugging Face datasets: Parquet and JSONL with the same rows.

What has no fixed form (tools, arguments of calls) is JSON: in JSONL as it is, in Parquet as text of
Arrow's JSON type, which `datasets` reads as objects again.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agentrl.databases.task_file.file_rows import UnreadableFile, is_table, read_rows
from agentrl.foreign_text import shown
from agentrl.rollout.demonstrations.absent import without_absent
from agentrl.whole_file import write_whole

if TYPE_CHECKING:
    import pyarrow

Format = Literal["messages", "tokens", "preferences"]
Kind = str | Mapping[str, "Kind"] | Sequence["Kind"]
"""The type of a value: Arrow's name of it or `json`; a mapping for an object, `[kind]` for a list.
"""

_BATCH = 512  # rows of a Parquet group
# Of every row: which trajectory it is of, and what became of that.
_OF_RECORD: dict[str, Kind] = {
    "record": "string", "task": "string", "task_id": "string", "rollout": "int64",
    "query": "string", "answer": "string", "scorer": "string", "final_answer": "string",
    "stop_reason": "string", "score": "double", "scores": "json", "advantage": "double",
}  # fmt: skip
_CALL: Kind = {"type": "string", "function": {"name": "string", "arguments": "json"}}
_MESSAGE: Kind = {
    "role": "string", "content": "string", "reasoning_content": "string",
    "tool_calls": [_CALL], "name": "string", "train": "bool",
}  # fmt: skip
_TURN: Kind = {
    "turn": "int64", "start": "int64", "end": "int64", "status": "string",
    "finish_reason": "string", "text": "string", "messages": "json", "tool_calls": "json",
    "rewrite": "string",
}  # fmt: skip
KINDS: dict[Format, dict[str, Kind]] = {
    "messages": {"messages": [_MESSAGE], "tools": "json", "conversation": "int64", **_OF_RECORD},
    "tokens": {
        "input_ids": ["int32"], "loss_mask": ["uint8"], "logprobs": ["float"],
        "versions": ["int32"], "advantages": ["float"], "reward": "double",
        "segment": "int64", "parent_turn": "int64", "shared": "int64", "turns": [_TURN],
        "temperature": "double", "trained": "bool", "tools": "json", **_OF_RECORD,
    },
    "preferences": {
        "prompt": [_MESSAGE], "chosen": [_MESSAGE], "rejected": [_MESSAGE], "tools": "json",
        "chosen_score": "double", "rejected_score": "double",
        "chosen_record": "string", "rejected_record": "string",
        **{name: _OF_RECORD[name] for name in ("task", "task_id", "query", "answer", "scorer")},
    },
}  # fmt: skip


class DataRow(NamedTuple):
    """A row of a file. `remark`: a sentence on its nulls, of which tables have some for absence."""

    place: str
    format: Format
    fields: dict[str, Any]
    remark: str | None = None


def format_of(fields: Mapping[str, Any]) -> Format:
    """The format of a row, by its fields: one of messages may have any layout of them."""
    if fields.get("input_ids") is not None:
        return "tokens"
    if fields.get("chosen") is not None and fields.get("rejected") is not None:
        return "preferences"
    return "messages"


def write_data(path: Path, format: Format, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows to a file, by its ending; returns how many. The file is complete or absent."""
    write = _write_parquet if path.suffix == ".parquet" else _write_lines
    with write_whole(path) as partial:
        return write(partial, KINDS[format], rows)


def _write_lines(path: Path, kinds: Mapping[str, Kind], rows: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            given = {name: _without_nulls(row.get(name)) for name in kinds}
            file.write(json.dumps(given, ensure_ascii=False) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, kinds: Mapping[str, Kind], rows: Iterable[Mapping[str, Any]]) -> int:
    # Imported here: it takes a moment, and JSONL does without.
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema([(name, _arrow(kind)) for name, kind in kinds.items()])
    features = {name: _feature(kind) for name, kind in kinds.items()}
    told = json.dumps({"info": {"features": features}})
    schema = schema.with_metadata({"huggingface": told})
    count = 0
    with ParquetWriter(path, schema) as writer:
        waiting = iter(rows)
        while some := list(islice(waiting, _BATCH)):
            columns = [
                _column(kind, [_as_arrow(kind, row.get(name)) for row in some])
                for name, kind in kinds.items()
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
            count += len(some)
    return count


def _column(kind: Kind, values: Sequence[Any]) -> "pyarrow.Array[Any]":
    import pyarrow

    return pyarrow.array(values, type=_storage(kind)).cast(_arrow(kind))


def _arrow(kind: Kind, json_type: Any = None) -> Any:
    import pyarrow

    if isinstance(kind, str):
        if kind == "json":
            return pyarrow.json_(pyarrow.string()) if json_type is None else json_type
        return getattr(pyarrow, {"double": "float64", "float": "float32", "bool": "bool_"}.get(
            kind, kind))()  # fmt: skip
    if isinstance(kind, Mapping):
        return pyarrow.struct([(name, _arrow(of, json_type)) for name, of in kind.items()])
    return pyarrow.list_(_arrow(kind[0], json_type))


def _storage(kind: Kind) -> Any:
    """The Arrow type with JSON as plain text, which values are first made of."""
    import pyarrow

    return _arrow(kind, pyarrow.string())


def _feature(kind: Kind) -> Any:
    """The type as `datasets` writes it into a file."""
    if isinstance(kind, str):
        if kind == "json":
            return {"_type": "Json"}
        names = {"double": "float64", "float": "float32"}
        return {"dtype": names.get(kind, kind), "_type": "Value"}
    if isinstance(kind, Mapping):
        return {name: _feature(of) for name, of in kind.items()}
    return {"feature": _feature(kind[0]), "_type": "List"}


def _as_arrow(kind: Kind, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, str):
        return json.dumps(value, ensure_ascii=False) if kind == "json" else value
    if isinstance(kind, Mapping):
        return {name: _as_arrow(of, value.get(name)) for name, of in kind.items()}
    return [_as_arrow(kind[0], each) for each in value] if not isinstance(kind[0], str) else value


def _without_nulls(value: Any) -> Any:
    """Messages without the fields that they lack, as people write them."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        return [{k: v for k, v in message.items() if v is not None} for message in value]
    return value


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except UnreadableFile as error:
        raise ValueError(f"{path} {error}") from None


def read_data(path: Path) -> Iterator[DataRow]:
    """The rows of a file. Raises ValueError for one of no use.

    Messages and tools are as they are written: `rollout.demonstrations` reads them.
    """
    with _named(path):
        for row in read_rows(path):
            place = row.place_in(path)
            if row.problem is not None:
                raise ValueError(f"{place} {row.problem}")
            given, remark = without_absent(row.fields, is_table(path))
            format = format_of(given)
            kinds = KINDS["tokens"] if format == "tokens" else _OF_RECORD
            try:
                fields = {name: _from_file(kinds.get(name), value) for name, value in given.items()}
            except ValueError as error:
                raise ValueError(f"{place} {error}") from None
            yield DataRow(place, format, fields, remark)


def _from_file(kind: Kind | None, value: Any) -> Any:
    """A value with its JSON read, and without nulls in objects."""
    if kind is None or value is None:
        return value
    if kind == "json":
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError(f"has {shown(value)} where JSON should be") from None
    if isinstance(kind, Mapping) and isinstance(value, dict):
        read = {name: _from_file(kind.get(name), of) for name, of in value.items()}
        return {name: of for name, of in read.items() if of is not None}
    if not isinstance(kind, str | Mapping) and isinstance(value, list):
        return value if isinstance(kind[0], str) else [_from_file(kind[0], v) for v in value]
    return value
