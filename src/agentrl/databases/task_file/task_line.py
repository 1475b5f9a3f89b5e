"""What a row of a task file says: a pure function from its fields to a TaskLine.

Our own layout:

    {"id": "a1", "query": "...", "answer": "...", "scorer": "math", "answer_schema": "boxed"}

`query` is required. `id` defaults to the row's number. `agent_name` and `system_prompt` take the
place of the run's. Or that of verl's datasets, whose columns
stand for ours where the row has none of these:

    prompt                      a text, or messages: the Task's `messages`, of which the last
                                one, the user's, is the query
    reward_model.ground_truth   the answer
    agent_name                  the agent that works on it
    extra_info.tools_kwargs     becomes the field `tools_kwargs`

Further fields are kept with the task, as they are. A null is a field that is not there: in a table,
every row has every column.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

import bson
from bson.errors import BSONError

from agentrl.databases.scorer_notation import write_scorer
from agentrl.databases.storable import fault

DEFAULT_SCORER = "agentcpm"
_OWN_FIELDS = (
    "id", "query", "answer", "scorer", "answer_schema", "agent_name", "system_prompt", "prompt",
)  # fmt: skip
_FIELDS_WE_READ = (*_OWN_FIELDS, "reward_model", "extra_info", "tools_kwargs")
_NEAR = 0.8  # similarity of a misspelling, up to 1: `anwser` and `answer` have 0.83
_SHOWN_FIELDS = 6
_LARGEST_MB = 12  # MongoDB's limit is 16 MB, and a Task is larger than its row
_SHORT_NAME = 3  # letters; shorter names are no misspellings: `idx` is not meant to be `id`
_ROLES = ("system", "user", "assistant", "tool")
T = TypeVar("T")
_NUMBER = re.compile(r"[-+]?\$?(\d[\d,]*(\.\d+)?|\.\d+)%?")


@dataclass(frozen=True)
class TaskLine:
    """One row of a task file.

    `messages`: a prompt given as a conversation that ends with a user message. `query` is then that
    message's text, unless the row has a `query`. `fields`: further fields of the row.
    """

    id: str
    query: str
    answer: str | None = None
    scorer: str = DEFAULT_SCORER
    answer_schema: str | None = None
    agent_name: str | None = None
    system_prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def parse_task(row: Mapping[str, Any], number: int) -> TaskLine:
    """The task in a row. `number`: the default id. Raises ValueError naming all wrong fields."""
    present = {name: value for name, value in row.items() if value is not None}
    problems: list[str] = []

    def of(parse: Callable[..., T], *arguments: Any, otherwise: T) -> T:
        try:
            return parse(*arguments)
        except ValueError as error:
            problems.append(str(error))
            return otherwise

    no_prompt: tuple[str, list[dict[str, Any]] | None] = ("", None)
    query, messages = of(_prompt, present, otherwise=no_prompt)
    answer = of(_answer, present, otherwise=None)
    given_scorer = present.get("scorer")
    task = TaskLine(
        id=of(_identifier, present.get("id", number), otherwise=""),
        query=query,
        answer=answer,
        scorer=of(_scorer, present, answer, otherwise="")
        if given_scorer is None
        else of(write_scorer, given_scorer, otherwise=""),
        answer_schema=of(_text, present, "answer_schema", otherwise=None),
        agent_name=of(_text, present, "agent_name", otherwise=None),
        system_prompt=of(_text, present, "system_prompt", otherwise=None),
        messages=messages,
        fields=of(_further, present, otherwise={}),
    )
    of(_refuse_unkeepable, task, otherwise=None)
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    return task


def misspelt_fields(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs (field of the row, one of our fields that the row lacks and that it resembles)."""
    present = (name for name, value in row.items() if value is not None)
    pairs = ((name, _near_field(name)) for name in present if name not in _FIELDS_WE_READ)
    return [(name, ours) for name, ours in pairs if ours is not None and row.get(ours) is None]


@lru_cache(maxsize=1024)
def _near_field(name: str) -> str | None:
    """The field of ours that a name resembles, if any."""
    plain = re.sub(r"[\s-]+", "_", name.strip().lower())
    if plain in _FIELDS_WE_READ or len(plain) <= _SHORT_NAME:
        return plain if plain in _FIELDS_WE_READ else None
    return next(iter(get_close_matches(plain, _FIELDS_WE_READ, n=1, cutoff=_NEAR)), None)


def _identifier(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"`id` is a {type(value).__name__}, not a text or a whole number")
    if not str(value).strip():
        raise ValueError("`id` is empty: give it a text, or leave it out (it is the row's number)")
    return str(value)


def _text(present: Mapping[str, Any], name: str) -> str | None:
    value = present.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`{name}` is a {type(value).__name__}, not a text")
    return value


def _prompt(present: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]] | None]:
    """The query, and the messages if there are any."""
    prompt, query = present.get("prompt"), _text(present, "query")
    if isinstance(prompt, list):
        messages = [_message(message, place) for place, message in enumerate(prompt)]
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("`prompt` does not end with a message of role `user`")
        return query or messages[-1]["content"], messages
    query = query or _text(present, "prompt")
    if query is None or not query.strip():
        meant = [name for name, ours in misspelt_fields(present) if ours in ("query", "prompt")]
        hint = f": is `{meant[0]}` meant to be it?" if meant else f"; it has {_names(present)}"
        raise ValueError(f"has no `query` (a text that is not empty) and no `prompt`{hint}")
    return query, None


def _names(present: Mapping[str, Any]) -> str:
    shown = ", ".join(f"`{name}`" for name in list(present)[:_SHOWN_FIELDS]) or "no field"
    return shown + (", ..." if len(present) > _SHOWN_FIELDS else "")


def _message(message: object, place: int) -> dict[str, Any]:
    where = f"`prompt[{place}]`"
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ValueError(f"{where} is not a message with a role of {', '.join(_ROLES)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""  # calls only
    if isinstance(content, list):
        # Multimodal content: only text parts can be used.
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError(f"{where}: its `content` has parts that are not of type `text`")
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: its `content` is a {type(content).__name__}, not a text")
    if message["role"] == "user" and not content.strip():
        raise ValueError(f"{where}: its `content` is empty")
    # In a table all messages have the same keys; unused ones are null.
    return {key: value for key, value in message.items() if value is not None} | {
        "content": content
    }


def _answer(present: Mapping[str, Any]) -> str | None:
    name, answer = "answer", present.get("answer")
    if answer is None:
        name, answer = "reward_model.ground_truth", _within(present, "reward_model", "ground_truth")
    if answer is not None and not isinstance(answer, str | int | float):
        raise ValueError(f"`{name}` is a {type(answer).__name__}, not a text or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"`{name}` is {answer}, which is not a number")
    return None if answer is None else str(answer)


def _scorer(present: Mapping[str, Any], answer: str | None) -> str:
    """The scorer of a row that names none.

    `math` for a row in verl's layout that is scored by a rule and is mathematics: its `ability` is
    "math", or its answer is a number, as in GSM8K.
    """
    by_rule = "reward_model" in present and _within(present, "reward_model", "style") != "model"
    mathematics = present.get("ability") == "math" or (
        answer is not None and _NUMBER.fullmatch(answer.strip()) is not None
    )
    if by_rule and mathematics:
        return "math"
    return DEFAULT_SCORER


def _further(present: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields, with `tools_kwargs` moved to the top level."""
    further = {name: value for name, value in present.items() if name not in _OWN_FIELDS}
    tools_kwargs = _within(present, "extra_info", "tools_kwargs")
    if tools_kwargs is not None:
        further.setdefault("tools_kwargs", tools_kwargs)
        kept = {name: v for name, v in present["extra_info"].items() if name != "tools_kwargs"}
        further["extra_info"] = kept
    if "tools_kwargs" in further:
        further["tools_kwargs"] = _tools_kwargs(further["tools_kwargs"])
    return further


def _refuse_unkeepable(task: TaskLine) -> None:
    """Raise ValueError for values that MongoDB cannot store."""
    for name, value in {**vars(task), **task.fields}.items():
        found = fault(value, f"`{name}`") if name != "fields" else None
        if found is not None:
            raise ValueError(found)
    for name in task.fields:
        if "\0" in name:
            raise ValueError(f"holds a field with a NUL character in its name ({name!r})")
    try:
        size = len(bson.encode(vars(task)))
    except (BSONError, OverflowError) as error:
        raise ValueError(f"holds a value that the database cannot store: {error}") from None
    if size > _LARGEST_MB * 1_000_000:
        raise ValueError(
            f"has {size / 1e6:.1f} MB, more than the {_LARGEST_MB} MB that the database can store "
            "of a task"
        )


def _tools_kwargs(tools_kwargs: object) -> dict[str, Any]:
    """`tools_kwargs` without nulls: in a table, each row has all rows' tools and arguments."""
    if not isinstance(tools_kwargs, dict):
        raise ValueError(f"`tools_kwargs` is a {type(tools_kwargs).__name__}, not an object")
    present = _without_nulls(tools_kwargs)
    assert isinstance(present, dict)
    return present


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


def _within(present: Mapping[str, Any], name: str, inner: str) -> Any:
    """Field `inner` of object `name`; None if absent. Raises ValueError if it is no object."""
    outer = present.get(name)
    if outer is None:
        return None
    if not isinstance(outer, dict):
        raise ValueError(f"`{name}` is a {type(outer).__name__}, not an object")
    return outer.get(inner)
