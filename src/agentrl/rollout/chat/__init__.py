"""Conversations as tokens: the chat template applied turn by turn.

    rendered prompt | generated ids, verbatim | delta | generated ids | delta | ...

    escaping.py       special-token escaping: text from outside never becomes a control token
    capabilities.py   what a template can express, found out by probing it
    renderer.py       a tokenizer with its template
    turns.py          a generated turn: its ids, and what its text says
    forms.py          the forms in which a template can be given a turn, each with its reason
    form_choice.py    which form is taken: what extends, what drifts
    sampled_ids.py    a whole prompt in which generated turns keep their ids
    piece_encoder.py  a prompt that is encoded only where it differs from the one before
    conversation.py   growing turn by turn, and rewriting; has a worked example
    said.py           what a turn says to its reader, also while it is sampled
    beside_loop.py    long conversations do not hold up the event loop
    exactness.py      is multi-turn training with a model exact? random conversations for `doctor`

A delta is what the template writes after a generated turn: the separator, tool results, the next
assistant header. It is read off the template itself, applied to the whole conversation after every
turn, and not written down here for a model family. Where the template would change what was
sampled, the conversation goes on in a new segment, rendered as the template wants it, in which the
turns that it leaves alone keep the ids that the model generated.
"""

from agentrl.rollout.chat.beside_loop import beside_loop
from agentrl.rollout.chat.capabilities import TemplateRefusal
from agentrl.rollout.chat.conversation import Conversation, Entry, NextPrompt
from agentrl.rollout.chat.form_choice import Drift
from agentrl.rollout.chat.renderer import ChatRenderer, ToolSchema
from agentrl.rollout.chat.turns import Message, n_characters

__all__ = [
    "ChatRenderer",
    "Conversation",
    "Drift",
    "Entry",
    "Message",
    "NextPrompt",
    "TemplateRefusal",
    "ToolSchema",
    "beside_loop",
    "n_characters",
]
