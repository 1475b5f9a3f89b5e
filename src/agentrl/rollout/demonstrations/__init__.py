"""Conversations that people bring, as the token trees that a rollout would have made of them.

    messages.py    a message of a row, in whichever form it is written
    absent.py      what the objects of a table lack
    layouts.py     a row of a file: messages, or prompt and completion, and what is trained of it
    preferences.py the same of a pair: one prompt, a chosen and a rejected answer
    tokens.py      the row's token tree, with a mask that is exact: 1 on what the model has to say
    call_ids.py    the ids by which results name calls, as the template takes them
    left_out.py    whether the prompt has what is said to the model
    read_back.py   whether a written turn can be sampled, and is read as the row's calls
    prepare.py     a whole file: its trees in a folder, and the rows that cannot be trained and why
    of_record.py   the reverse: a Record's conversations as messages
    to_record.py   a row as the turns of a Record

Prompts, turns and deltas are those of `rollout.chat`, so that supervised training sees the tokens
that sampling sees. Where the chat template rewrites earlier turns (it drops their thoughts, say),
the conversation is a tree: each turn stands behind the prompt that it is sampled from.
"""

from agentrl.rollout.demonstrations.layouts import (
    Demonstration,
    PlainText,
    read_demonstration,
)
from agentrl.rollout.demonstrations.prepare import PreparedRows, prepare_rows
from agentrl.rollout.demonstrations.tokens import demonstrated_tree

__all__ = [
    "Demonstration",
    "PlainText",
    "PreparedRows",
    "demonstrated_tree",
    "prepare_rows",
    "read_demonstration",
]
