"""The rows of `agentrl export-data`: Records of a run as messages, as tokens, and as preferences.

    messages      a conversation, with the tools; TRL's SFTTrainer and `agentrl sft` read it
    tokens        a segment, with what the trainer has of each token
    preferences   the best and the worst conversation of a group; TRL's DPOTrainer reads it

`data_import.py` reads the rows again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.databases.arrays import unpack_ints
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Record,
    Task,
)
from agentrl.launcher.group_pair import best_and_worst
from agentrl.rollout.chat import ChatRenderer, Message, ToolSchema
from agentrl.rollout.chat.tokens import TokenContext
from agentrl.rollout.demonstrations.of_record import Told, conversations
from agentrl.rollout.groups.row_building import advantages_of, is_shared, replay

Fields = dict[str, Any]

_OF_CALL = {"name", "arguments", "result", "is_error"}


class NotExported(ValueError):
    """A Record has no row in a format. The message says why."""


@dataclass(frozen=True)
class Stored:
    """A Record with all that its rows are made of. `row`: its training row, if it has one."""

    record: Record
    task: Task
    turns: Sequence[DispatchedSamplingTask]
    tools: Sequence[ToolSchema]
    row: DBRecordData | None
    temperature: float

    @property
    def fields(self) -> Fields:
        """The columns that all formats share."""
        record, task = self.record, self.task
        return {
            "record": record.id, "task": record.task, "task_id": record.task_id,
            "rollout": record.rollout, "query": task.query, "answer": task.answer,
            "scorer": task.scorer, "final_answer": record.final_answer,
            "stop_reason": record.stop_reason, "score": record.score,
            "scores": record.scores or None, "advantage": record.advantage,
        }  # fmt: skip

    @property
    def has_tokens(self) -> bool:
        """Whether its turns have tokens: not those of an API or of imported messages."""
        return bool(self.turns) and all(turn.output_ids for turn in self.turns)


def message_rows(stored: Stored, renderer: ChatRenderer | None) -> list[Fields]:
    """One row for each conversation with a turn to train. Raises `NotExported`."""
    tools = list(stored.tools) or None
    rows = [
        {"messages": _form(told.messages), "tools": tools, "conversation": number, **stored.fields}
        for number, told in enumerate(_told(stored, renderer))
        if told.trained
    ]
    if not rows:
        raise NotExported("has no completed turn")
    return rows


def preference_row(group: Sequence[Stored], renderer: ChatRenderer | None) -> Fields:
    """The pair of a group's best and worst Record, by score.

    Raises `NotExported` if the scores are equal.
    """
    by_id = {stored.record.id: stored for stored in group}
    pair = best_and_worst(
        {id: one.record.score for id, one in by_id.items() if one.record.score is not None}
    )
    if pair is None:
        raise NotExported("has no two records with different scores")
    chosen, rejected = (by_id[id] for id in pair)
    told = [_alone(stored, renderer) for stored in (chosen, rejected)]
    n_prompt = _n_common(*told)
    prompt = _untold(told[0].messages[:n_prompt])
    answers = [_answer(of, n_prompt) for of in told]
    common = ("task", "task_id", "query", "answer", "scorer")
    return {
        "prompt": prompt, "chosen": answers[0], "rejected": answers[1],
        "tools": list(chosen.tools) or None,
        "chosen_score": chosen.record.score, "rejected_score": rejected.record.score,
        "chosen_record": chosen.record.id, "rejected_record": rejected.record.id,
        **{name: chosen.fields[name] for name in common},
    }  # fmt: skip


def _n_common(chosen: Told, rejected: Told) -> int:
    """Number of messages of the prompt of both: what they begin with before a turn to train."""
    both = zip(chosen.messages, rejected.messages, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    if shared < max(chosen.n_prompt, rejected.n_prompt):
        raise NotExported("has records that begin with different messages")
    n_common = min(shared, chosen.n_given, rejected.n_given)
    while n_common and chosen.messages[n_common - 1]["role"] == "assistant":
        n_common -= 1
    return n_common


def _answer(told: Told, n_prompt: int) -> list[Message]:
    """The messages behind the prompt. A preference is about the whole: failed turns too."""
    given = {at - n_prompt for at in told.given}
    answer = _form(told.messages[n_prompt:])
    return [one if at in given else _untold([one])[0] for at, one in enumerate(answer)]


def _untold(messages: Sequence[Message]) -> list[Message]:
    """The messages without what is trained of them."""
    return [{k: v for k, v in message.items() if k != "train"} for message in messages]


def _alone(stored: Stored, renderer: ChatRenderer | None) -> Told:
    told = _told(stored, renderer)
    if len(told) > 1:
        raise NotExported(f"has record {stored.record.id}, whose context was rewritten")
    return told[0]


def _told(stored: Stored, renderer: ChatRenderer | None) -> list[Told]:
    if not stored.turns:
        raise NotExported("has no turn")
    try:
        return conversations(stored.turns, renderer, stored.tools)
    except ValueError as error:
        raise NotExported(str(error)) from None


def _form(messages: Sequence[Message]) -> list[Message]:
    return [dict(message) for message in messages]


def token_rows(stored: Stored) -> list[Fields]:
    """One row for each segment, with the shared tokens of earlier ones. Raises `NotExported`.

    A token is trained (`loss_mask` 1) in the segment in which it was generated.
    """
    if not stored.has_tokens:
        raise NotExported("has turns without tokens")
    of_turns = _generated(stored)
    try:
        context = replay(stored.turns, of_turns)
    except ValueError as error:
        raise NotExported(f"has turns that do not fit together: {error}") from None
    return list(_segments(stored, context))


def _segments(stored: Stored, context: TokenContext) -> Iterator[Fields]:
    numbers = {turn.id: turn.turn for turn in stored.turns}
    for number in range(len(context.segments)):
        turns = [turn for turn in stored.turns if turn.segment == number]
        first, line = turns[0], context.line(number)
        # What follows the last turn was never in a prompt.
        end = turns[-1].prompt_len + len(unpack_ints(turns[-1].output_ids))
        mask = np.where(np.arange(len(line)) < first.shared_len, 0, line["mask"])
        columns = {
            "input_ids": line["ids"], "loss_mask": mask, "logprobs": line["logprobs"],
            "versions": line["versions"], "advantages": line["advantages"],
        }  # fmt: skip
        yield {
            **{name: values[:end].tolist() for name, values in columns.items()},
            "reward": stored.record.score,
            "segment": number,
            "parent_turn": None if first.parent is None else numbers[first.parent],
            "shared": first.shared_len,
            "turns": [_turn(turn) for turn in turns],
            "temperature": stored.temperature,
            "trained": stored.row is not None,
            "tools": list(stored.tools) or None,
            **stored.fields,
        }


def _turn(turn: DispatchedSamplingTask) -> Fields:
    return {
        "turn": turn.turn,
        "start": turn.prompt_len,
        "end": turn.prompt_len + len(unpack_ints(turn.output_ids)),
        "status": turn.status,
        "finish_reason": turn.finish_reason,
        "text": turn.output_text,
        "messages": turn.messages,
        "tool_calls": [call.model_dump(include=_OF_CALL) for call in turn.tool_calls],
        "rewrite": turn.rewrite,
    }


def _generated(stored: Stored) -> list[Mapping[str, NDArray[Any]]]:
    """Mask and advantages of each turn's tokens: the training row's, else as it would have them."""
    sizes = [len(unpack_ints(turn.output_ids)) for turn in stored.turns]
    if stored.row is None:
        record = stored.record
        of_turns = advantages_of(record, stored.turns, record.advantage or 0.0)
        return [
            {
                "mask": np.full(size, turn.trained and not is_shared(record, turn), np.uint8),
                "advantages": np.full(size, value, np.float32),
            }
            for turn, size, value in zip(stored.turns, sizes, of_turns, strict=True)
        ]
    # The tree of the same turns, with each generated token's number in their order.
    ends = np.cumsum(sizes)
    counted = [
        {"staleness": np.arange(end - size, end, dtype=np.int32)}
        for size, end in zip(sizes, ends.tolist(), strict=True)
    ]
    marks, tree = replay(stored.turns, counted).tree(), stored.row.tree
    if not np.array_equal(marks["ids"], tree["ids"]):
        raise NotExported("has a training row of other tokens than its turns")
    generated = marks["mask"] == 1
    order = marks["staleness"][generated]
    columns = {}
    for name in ("mask", "advantages"):
        columns[name] = np.empty(len(order), tree[name].dtype)
        columns[name][order] = tree[name][generated]
    return [
        {name: values[end - size : end] for name, values in columns.items()}
        for size, end in zip(sizes, ends.tolist(), strict=True)
    ]
