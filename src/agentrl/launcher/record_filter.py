"""`--where` of every verb, and the search of `agentrl view`: conditions on Records.

    score<0.5   status=failed   task_id=train-17   step>=10   tokens.generated>200
    '{"turn_statuses.repeaterror": {"$gt": 2}}'

A condition is FIELD, one of = != < <= > >=, and a value. All conditions must hold. A field is a
field of a Record (with dots for nested ones), a column of `--list`, or one that other documents
have: `step`, the optimizer step whose weights began the Record; `label`, of a note on it;
`trained`, whether a step trained it. A text that begins with { is a filter in MongoDB's notation,
without its operators that run JavaScript in mongod.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from bson import encode, json_util
from bson.errors import BSONError
from pydantic import BaseModel
from pymongo.errors import ExecutionTimeout, NetworkTimeout, OperationFailure

from agentrl.configs import ConfigError
from agentrl.databases.connection import BEFORE_ALL, RunDatabase
from agentrl.databases.documents import Record, RecordStatus, Split

# The columns of `--list`, by the fields that they show.
COLUMNS = {
    "id": "_id",
    "task": "task_id",
    "rollout": "rollout",
    "adv": "advantage",
    "turns": "n_turns",
    "tools": "n_tool_calls",
    "tokens": "tokens.generated",
    "stop": "stop_reason",
}
STEP, LABEL, TRAINED = "step", "label", "trained"
_OPERATORS = {"!=": "$ne", "<=": "$lte", ">=": "$gte", "<": "$lt", ">": "$gt", "=": "$eq"}
_CONDITION = re.compile(r"\s*([\w.]+)\s*(!=|<=|>=|=|<|>)(.*)", re.DOTALL)

# They run JavaScript in the mongod of the run, which its samplers and its trainer wait for.
_JAVASCRIPT = frozenset({"$where", "$function", "$accumulator"})
_SHOWN = 200  # characters of a filter in an error
LONGEST_S = 10.0  # a list of Records that takes longer is given up

Filter = dict[str, Any]


@dataclass(frozen=True)
class Lookup:
    """Documents beside the Records that a condition is on: where, which, and what of them."""

    collection: str
    wanted: Filter
    fields: tuple[str, ...] = ("_id",)


LARGEST_LOOKUP = 200_000  # documents; MongoDB takes no filter above 16 MB
_LOOKUPS = {
    STEP: Lookup("policy_versions", {}, ("version", "step")),
    LABEL: Lookup("notes", {}, ("labels",)),
    TRAINED: Lookup("record_data", {"trained.step": {"$gte": 0}}),
}


def read_conditions(conditions: Sequence[str]) -> Filter:
    """Parse the conditions into a filter. `resolved` then replaces those on other documents.

    Raises `ConfigError` for an invalid condition.
    """
    read = [_read(condition) for condition in conditions]
    found: Filter = {"$and": read} if read else {}
    try:
        encode(found)
        operator = _javascript(found)
    except (BSONError, OverflowError, RecursionError, ValueError) as error:
        raise ConfigError(f"--where: MongoDB has no such value ({error})") from None
    if operator is not None:
        raise ConfigError(
            f"--where: {operator} would run JavaScript in the run's MongoDB: say it with "
            "comparisons, or with $expr"
        )
    return found


def _javascript(value: Any) -> str | None:
    """An operator within the filter that runs JavaScript."""
    if isinstance(value, Mapping):
        own = next((name for name in value if name in _JAVASCRIPT), None)
        return own or next(filter(None, map(_javascript, value.values())), None)
    if isinstance(value, list):
        return next(filter(None, map(_javascript, value)), None)
    return None


def names_field(conditions: Filter, field: str) -> bool:
    """Whether a condition is on this field."""
    return any(field in condition for condition in conditions.get("$and", ()))


def _read(condition: str) -> Filter:
    if condition.lstrip().startswith("{"):
        return _read_json(condition)
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ConfigError(
            f"--where {condition!r}: not FIELD=VALUE, with one of = != < <= > >= (in quotes, for "
            "the shell)"
        )
    name, operator, text = match[1], match[2], match[3].strip()
    field = _field(name, condition)
    value = _value(text)
    if field == TRAINED and (operator not in ("=", "!=") or not isinstance(value, bool)):
        raise ConfigError(f"--where {condition!r}: write trained=true or trained=false")
    if field == "status" and text not in tuple(RecordStatus):
        hint = "; of a trained one it is ready: write trained=true" if text == TRAINED else ""
        raise ConfigError(
            f"--where {condition!r}: the status of a Record is one of "
            f"{', '.join(RecordStatus)}{hint}"
        )
    if _is_numeric(field) and not _is_number(value) and value is not None:
        raise ConfigError(f"--where {condition!r}: {name} is a number, not {text!r}")
    if operator in ("=", "!="):
        # A task's id may be a text of digits, so both types match.
        values = [value] if value == text else [value, text]
        return {field: {"$in" if operator == "=" else "$nin": values}}
    if field == LABEL or not _is_number(value):
        raise ConfigError(f"--where {condition!r}: {operator} compares with a number, not {text!r}")
    return {field: {_OPERATORS[operator]: value}}


def _read_json(text: str) -> Filter:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    try:
        found = json_util.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--where {shown}: not JSON ({error})") from None
    except (TypeError, KeyError, ArithmeticError, BSONError) as error:
        raise ConfigError(f"--where {shown}: no value of MongoDB's ({error!r})") from None
    if not isinstance(found, dict):  # as {"$oid": "..."} is a value
        raise ConfigError(f"--where {shown}: a value, not a filter that names a field")
    if elsewhere := [name for name in _LOOKUPS if name in found]:
        raise ConfigError(
            f"--where {shown}: no Record in the database has {elsewhere[0]}; write it as a "
            f"condition of its own, as {elsewhere[0]}=VALUE"
        )
    return found


def _field(name: str, condition: str) -> str:
    first, dot, rest = name.partition(".")
    if name in COLUMNS:
        return COLUMNS[name]
    if name in _LOOKUPS or first in Record.model_fields:
        return first + dot + rest
    known = {*COLUMNS, *_LOOKUPS, *Record.model_fields}
    near = get_close_matches(first, known, 1)
    hint = f": do you mean {near[0]}?" if near else f"; there are {', '.join(sorted(known))}"
    raise ConfigError(f"--where {condition!r}: a Record has no field {first!r}{hint}")


def _is_numeric(field: str) -> bool:
    """Whether a field of a Record, with dots for nested ones, is a number or null."""
    if field == STEP:
        return True
    kinds: list[Any] = [Record]
    for part in field.split("."):
        kinds = [kind for outer in kinds for kind in _kinds(_inner(outer, part))]
    return bool(kinds) and set(kinds) <= {int, float}


def _inner(outer: Any, part: str) -> Any:
    """The type of a part of a document or a mapping; None of anything else."""
    if get_origin(outer) is dict:
        return get_args(outer)[1]
    fields = outer.model_fields if isinstance(outer, type) and issubclass(outer, BaseModel) else {}
    return fields[part].annotation if part in fields else None


def _kinds(annotation: Any) -> Sequence[Any]:
    """The types of an annotation, without null."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return [kind for kind in kinds if kind is not NoneType]


def _is_number(value: Any) -> bool:
    # Nothing is equal to NaN, or less, or more.
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _value(text: str) -> Any:
    """Parse a number, true, false, null or a quoted text. Any other text is itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, dict | list) else value


def lookups(conditions: Filter) -> dict[str, Lookup]:
    """The documents that `resolved` needs, by the field that they have."""
    return {name: lookup for name, lookup in _LOOKUPS.items() if names_field(conditions, name)}


def resolved(conditions: Filter, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Filter:
    """Replace the conditions on other documents by ones on Records.

    `found`: the documents of `lookups`, `LARGEST_LOOKUP` + 1 at the most. Raises `ConfigError` if
    there are so many.
    """
    for name, documents in found.items():
        if len(documents) > LARGEST_LOOKUP:
            raise ConfigError(
                f"--where {name}: the run has more than {LARGEST_LOOKUP:,} of these; "
                "`agentrl.open_run(...).rows()` has them all"
            )
    given = [_on_records(condition, found) for condition in conditions.get("$and", ())]
    return {"$and": given} if given else {}


def _on_records(condition: Filter, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Filter:
    [(field, test)] = condition.items() if len(condition) == 1 else [("", {})]
    if field == STEP:
        versions = [policy["version"] for policy in found[STEP] if _holds(policy["step"], test)]
        return {"versions.min": {"$in": versions}}
    if field == LABEL:
        [(operator, labels)] = test.items()
        return {
            "_id": {
                operator: [
                    note["_id"] for note in found[LABEL] if {*note["labels"]} & {*map(str, labels)}
                ]
            }
        }
    if field == TRAINED:
        [(operator, values)] = test.items()
        are = (True in values) == (operator == "$in")
        return {"_id": {"$in" if are else "$nin": [row["_id"] for row in found[TRAINED]]}}
    return condition


async def resolved_in(database: RunDatabase, conditions: Filter) -> Filter:
    """The conditions as ones on Records, by the documents of a run. Raises as `resolved` does."""
    found = {}
    for name, lookup in lookups(conditions).items():
        documents = database.database[lookup.collection].find(lookup.wanted, lookup.fields)
        found[name] = await documents.to_list(LARGEST_LOOKUP + 1)
    return resolved(conditions, found)


async def selected(database: RunDatabase, conditions: Filter, split: Split) -> list[Filter]:
    """What Records of a run must fulfil. `split` is ignored if a condition is on the split.

    Raises `ConfigError` as `resolved` does.
    """
    filters = [await resolved_in(database, conditions)]
    return filters if names_field(conditions, "split") else [*filters, {"split": split}]


async def finished_records(
    database: RunDatabase, conditions: Filter, split: Split
) -> list[Mapping[str, Any]]:
    """`_id`, `task` and `score` of the Records that ran to their end, in order of ids.

    Failed and quarantined ones are among them only if a condition is on the status.
    """
    filters = await selected(database, conditions, split)
    filters += [{"finished_at": {"$gt": BEFORE_ALL}}, {"n_turns": {"$gt": 0}}]
    if not names_field(conditions, "status"):
        filters.append({"status": {"$nin": [RecordStatus.FAILED, RecordStatus.QUARANTINED]}})
    with refused_by_mongod():
        fields = {"_id": 1, "task": 1, "score": 1}
        found = database.records.find({"$and": filters}, fields).sort("_id", 1)
        return [document async for document in found]


@contextmanager
def refused_by_mongod() -> Iterator[None]:
    """Raise `ConfigError` for a filter in the block that MongoDB refuses, or is too long at."""
    try:
        yield
    except (ExecutionTimeout, NetworkTimeout):
        raise ConfigError(
            "--where: MongoDB takes too long to find the records: ask for fewer, as those of a "
            "task or a step"
        ) from None
    except OperationFailure as error:
        reason = (error.details or {}).get("errmsg", str(error))
        raise ConfigError(f"--where: MongoDB refuses the filter ({reason})") from None


def _holds(step: int, test: dict[str, Any]) -> bool:
    [(operator, value)] = test.items()
    if operator in ("$in", "$nin"):
        return (step in value) == (operator == "$in")
    return bool(
        {"$lt": step < value, "$lte": step <= value, "$gt": step > value, "$gte": step >= value}[
            operator
        ]
    )
