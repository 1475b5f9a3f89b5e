"""Rows of a file as a run's documents: Tasks, Records, turns and training rows.

The reverse of `data_rows.py`: what is exported, imported and exported again has the same content.
Rows of other programs lack most fields; they get ids by their place in the file.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import orjson
from numpy.typing import DTypeLike, NDArray
from pydantic import ValidationError

from agentrl.databases.arrays import pack_floats, pack_ints
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    Slot,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
    ToolCall,
    ToolList,
    TurnStatus,
)
from agentrl.databases.records import turn_id
from agentrl.databases.tasks import record_id, task_key
from agentrl.databases.token_tree import COLUMNS
from agentrl.foreign_text import shown
from agentrl.launcher.data_file import KINDS, DataRow, Format
from agentrl.policy_version import VersionSpan
from agentrl.rollout.demonstrations import (
    Demonstration,
    PlainText,
    layouts,
    preferences,
    read_demonstration,
)
from agentrl.rollout.demonstrations.to_record import turns_of
from agentrl.rollout.groups.boundary import check_row
from agentrl.rollout.groups.row_building import build_row, replay

OWNER = "import"
_READ: Mapping[Format, frozenset[str]] = {
    "messages": layouts.READ_FIELDS, "preferences": preferences.READ_FIELDS, "tokens": frozenset(),
}  # fmt: skip
Fields = Mapping[str, Any]


@dataclass
class Imported:
    """The documents of a file.

    not_kept: how many rows have a field that is not kept, by its name
    unread: the same of fields of their messages
    remarks: of how many rows a sentence is true, by the sentence
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    turns: list[DispatchedSamplingTask] = field(default_factory=list)
    rows: list[DBRecordData] = field(default_factory=list)
    tool_lists: dict[str, ToolList] = field(default_factory=dict)
    not_kept: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)

    @property
    def versions(self) -> list[int]:
        """The policy versions of the tokens."""
        return sorted({version for row in self.rows for version in row.policy_versions})


@dataclass(frozen=True)
class _Conversation:
    """A conversation, and the fields of its row with the ids of task and Record."""

    fields: Fields
    shown: Demonstration


def documents(rows: Iterable[DataRow]) -> Imported:
    """The documents of a file's rows. Raises ValueError with a place."""
    made = Imported()
    segments: dict[str, list[tuple[str, Fields]]] = {}
    conversations: dict[str, list[tuple[str, _Conversation]]] = {}
    for number, (place, format, fields, remark) in enumerate(rows):
        made.remarks.update([remark] if remark else [])
        kept = {*KINDS[format], *_READ[format]}
        made.not_kept.update(name for name, value in fields.items() if value and name not in kept)
        with _at(place):
            if format == "tokens":
                named = _named(number, fields)
                segments.setdefault(named["record"], []).append((place, named))
                continue
            read = _pair if format == "preferences" else _demonstration
            found = read(number, fields)
            made.unread.update(frozenset().union(*(one.shown.unread for one in found)))
            for one in found:
                conversations.setdefault(one.fields["record"], []).append((place, one))
    for of_one in conversations.values():
        with _at(of_one[0][0]):
            _add_messages(made, [conversation for _, conversation in of_one])
    for parts in segments.values():
        with _at(parts[0][0]):
            _add_tokens(made, [fields for _, fields in parts])
    return made


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Errors within are one sentence that begins with the row's place."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place} {_sentence(error)}") from None


def _sentence(error: Exception) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        told = fault["msg"][:1].lower() + fault["msg"][1:]
        return f"has {shown(fault['input'])} as `{where}`: {told}"
    return f"lacks {error}" if isinstance(error, KeyError) else str(error)


def _named(number: int, fields: Fields) -> dict[str, Any]:
    """The fields with the ids of task and Record, which rows of other programs lack."""
    task_id = fields.get("task_id") or f"row-{number:07}"
    for name, kinds in (("task_id", (str, int)), ("task", (str,)), ("record", (str,))):
        value = fields.get(name)
        if value and not isinstance(value, kinds):
            raise ValueError(f"has {shown(value)} as `{name}`, which must be a text")
    task = fields.get("task") or task_key(Split.TRAIN, 0, str(task_id))
    rollout = fields.get("rollout") or 0
    if not isinstance(rollout, int) or rollout < 0:
        raise ValueError(f"has {shown(rollout)} as `rollout`, which must be a number from 0")
    record = fields.get("record") or record_id(task, rollout, 0)
    return {**fields, "task_id": str(task_id), "task": task, "rollout": rollout, "record": record}


def _demonstration(number: int, fields: Fields) -> list[_Conversation]:
    """The one conversation of a row, in whatever layout `agentrl sft` reads."""
    return [_Conversation(_named(number, fields), _of_messages(read_demonstration(fields)))]


def _pair(number: int, fields: Fields) -> list[_Conversation]:
    """A preference as two conversations of one task."""
    both = [_of_messages(answer) for answer in preferences.read_preference(fields)]
    better, worse = fields.get("chosen_score"), fields.get("rejected_score")
    if better is None or worse is None:
        better, worse = 1.0, 0.0
    if not (_is_number(better) and _is_number(worse) and better > worse):
        raise ValueError(
            f"has {shown(better)} as `chosen_score`, which is not above {shown(worse)}, its "
            "`rejected_score`: a run knows by its scores which answer was chosen"
        )
    task = _named(number, {**fields, "record": None})
    found: list[_Conversation] = []
    sides = zip(("chosen", "rejected"), (better, worse), both, strict=True)
    for rollout, (which, score, answer) in enumerate(sides):
        record = fields.get(f"{which}_record") or record_id(task["task"], rollout, 0)
        own = {"record": record, "rollout": rollout, "score": score}
        found.append(_Conversation({**task, **own}, answer))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _of_messages(read: Demonstration | PlainText) -> Demonstration:
    if isinstance(read, PlainText):
        raise ValueError(
            "is a text without a chat template, and a run keeps messages: `agentrl sft` and "
            "`agentrl dpo` train it with --train_file"
        )
    return read


def _add_messages(made: Imported, conversations: Sequence[_Conversation]) -> None:
    """A Record whose turns have texts and calls, and no tokens."""
    fields, read = conversations[0].fields, conversations[0].shown
    if len(conversations) > 1:
        raise ValueError(
            f"is a second conversation of record {fields['record']}, whose context was "
            "rewritten; such records are imported from --format tokens"
        )
    turns = [
        DispatchedSamplingTask(
            id=turn_id(fields["record"], number), record_id=fields["record"], turn=number,
            segment=0, service=OWNER, prompt_delta_ids=b"", prompt_len=0, output_ids=b"",
            output_logprobs=b"", finish_reason="stop", versions=[], generate_latency_s=0.0,
            created_at=datetime.now(UTC), **turn,
        )
        for number, turn in enumerate(turns_of(read))
    ]  # fmt: skip
    _add_record(made, {**fields, "tools": read.tools}, turns, RecordStatus.ABANDONED)


def _add_tokens(made: Imported, segments: Sequence[Fields]) -> None:
    """A Record with its tokens, and its training row if it had one."""
    ordered = sorted(segments, key=lambda segment: segment.get("segment") or 0)
    first = ordered[0]
    turns: list[DispatchedSamplingTask] = []
    columns: list[dict[str, Any]] = []
    for number, fields in enumerate(ordered):
        if (fields.get("segment") or 0) != number:
            raise ValueError(
                f"is of record {first['record']}, of which segment {number} is missing"
            )
        for turn, of_tokens in _turns_of_segment(fields, number, first["record"]):
            turns.append(turn)
            columns.append(of_tokens)
    context = replay(turns, columns)  # raises if they do not fit together
    trained = first.get("trained", True)
    status = RecordStatus.READY if trained else RecordStatus.ABANDONED
    record = _add_record(made, first, turns, status)
    record.n_segments, record.tokens = len(ordered), context.counts
    record.n_continuations, record.versions = context.n_continuations, context.versions
    if trained:
        task = made.tasks[record.task]
        row = build_row(
            record, turns, record.advantage or 0.0, first.get("temperature") or 1.0,
            task.group_order,
        )  # fmt: skip
        tree = context.tree()
        row.tree, row.n_train_tokens = tree, int(tree["mask"].sum())
        row.policy_versions = np.unique(tree["versions"][tree["mask"] == 1]).tolist()
        check_row(row)
        made.rows.append(row)


def _turns_of_segment(
    fields: Fields, number: int, record: str
) -> list[tuple[DispatchedSamplingTask, dict[str, Any]]]:
    columns = {
        name: _column(fields[column.stored], column.stored, column.dtype)
        for name, column in COLUMNS.items()
        if column.stored is not None and not (column.optional and column.stored not in fields)
    }
    if len({len(values) for values in columns.values()}) != 1:
        raise ValueError(f"has columns of different lengths: {', '.join(columns)}")
    if len(ids := columns["ids"]) and ids.min() < 0:
        raise ValueError(f"has {ids.min()} in `input_ids`, which is no token")
    if len(mask := columns["mask"]) and mask.max() > 1:
        raise ValueError(f"has {mask.max()} in `loss_mask`, which is 0 or 1")
    logprobs, versions = columns["logprobs"], columns["versions"]
    parent, shared = fields.get("parent_turn"), fields.get("shared") or 0
    before = shared
    found: list[tuple[DispatchedSamplingTask, dict[str, Any]]] = []
    for turn in fields["turns"]:
        start, end = turn["start"], turn["end"]
        if not before <= start < end <= len(ids):
            raise ValueError(f"has a turn from token {start} to {end}, which cannot be")
        begins = before == shared and not found
        document = DispatchedSamplingTask(
            id=turn_id(record, turn["turn"]), record_id=record, turn=turn["turn"],
            status=turn.get("status") or TurnStatus.COMPLETED, segment=number,
            parent=turn_id(record, parent) if begins and parent is not None else None,
            shared_len=shared if begins else 0, service=OWNER,
            messages=turn.get("messages") or [], rewrite=turn.get("rewrite"),
            tool_calls=[ToolCall(**call) for call in turn.get("tool_calls") or ()],
            prompt_delta_ids=pack_ints(ids[before:start]), prompt_len=start,
            output_ids=pack_ints(ids[start:end]), output_logprobs=pack_floats(logprobs[start:end]),
            output_text=turn.get("text") or "", finish_reason=turn.get("finish_reason") or "stop",
            versions=_spans(versions[start:end].tolist()), generate_latency_s=0.0,
            created_at=datetime.now(UTC), trained=bool(columns["mask"][start:end].any()),
        )  # fmt: skip
        own = {name: columns[name][start:end] for name in ("mask", "advantages")}
        failed = np.full(end - start, document.status != TurnStatus.COMPLETED)
        found.append((document, own | {"capped": failed}))
        before = end
    return found


def _column(given: Any, name: str, dtype: DTypeLike) -> NDArray[Any]:
    """A value for each token [N]. Raises ValueError for what is no list of such numbers."""
    try:
        values = np.asarray(given)
    except ValueError:  # lists of several lengths
        values = np.asarray("")
    if values.ndim != 1 or values.dtype.kind not in "iufb":
        raise ValueError(f"has no `{name}` as a list of numbers")
    with np.errstate(all="ignore"):  # what does not fit is seen below
        stored = values.astype(dtype)
    wrong = ~np.isfinite(stored) if stored.dtype.kind == "f" else stored != values
    if wrong.any():
        first = values[wrong][0]
        raise ValueError(f"has {first} in `{name}`, which is kept as {stored.dtype}")
    return stored


def _spans(versions: Sequence[int]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for place, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, place + 1)
        else:
            spans.append(VersionSpan(version, place, place + 1))
    return spans


def _add_record(
    made: Imported, fields: Fields, turns: Sequence[DispatchedSamplingTask], status: RecordStatus
) -> Record:
    now, task = datetime.now(UTC), fields["task"]
    if fields["record"] in made.records:
        raise ValueError(f"has a second record {fields['record']}")
    query = fields.get("query") or _question(turns)
    statuses = [str(turn.status) for turn in turns]
    record = Record(
        id=fields["record"], task=task, task_id=fields["task_id"], rollout=fields["rollout"],
        attempt=0, split=Split.TRAIN, epoch=0, owner=OWNER, status=status, query=query,
        turns=[turn.id for turn in turns], n_turns=len(turns), n_segments=1,
        n_tool_calls=sum(len(turn.tool_calls) for turn in turns),
        turn_statuses={each: statuses.count(each) for each in dict.fromkeys(statuses)},
        final_answer=fields.get("final_answer"), stop_reason=fields.get("stop_reason"),
        score=fields.get("score"), scores=fields.get("scores") or {},
        advantage=fields.get("advantage"), started_at=now, sampled_at=now, finished_at=now,
        tool_list=_add_tools(made, fields.get("tools")),
        left_out=None if status == RecordStatus.READY else "imported without a training row",
    )  # fmt: skip
    if record.score is None and fields.get("reward") is not None:
        record.score = fields["reward"]
    made.records[record.id] = record
    made.turns += turns
    slot = Slot(
        rollout=record.rollout, status=SlotStatus.COMPLETED, record=record.id, score=record.score
    )
    known = made.tasks.get(task)
    if known is not None:
        known.slots.append(slot)
        return record
    seq = len(made.tasks)
    made.tasks[task] = Task(
        id=task, split=Split.TRAIN, epoch=0, seq=seq, group_order=seq,
        status=TaskStatus.COMPLETED, task_id=record.task_id, query=query,
        answer=fields.get("answer"), scorer=fields.get("scorer") or "agentcpm", pending=0,
        slots=[slot], created_at=now, completed_at=now,
    )  # fmt: skip
    return record


def _question(turns: Sequence[DispatchedSamplingTask]) -> str:
    asked = [message for message in turns[0].messages if message["role"] == "user"]
    return str(asked[-1]["content"]) if asked else ""


def _add_tools(made: Imported, tools: Any) -> str | None:
    if not tools:
        return None
    schemas = orjson.dumps(tools)
    digest = hashlib.blake2b(schemas, digest_size=16).hexdigest()
    made.tool_lists[digest] = ToolList(id=digest, schemas=schemas.decode())
    return digest
