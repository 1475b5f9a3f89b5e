"""Conversations as tokens: the chat template applied turn by turn.

    rendered prompt | generated ids, verbatim | delta | generated ids | delta | ...

    guard.py         encoding in which text from outside never becomes a control token
    turns.py         a generated turn as a message, in the ways a template may take it
    dialect.py       what a template can express, found out by probing it
    renderer.py      a tokenizer with its template
    conversation.py  growing turn by turn: what extends, what drifts, and rewriting

A delta is what the template writes after a generated turn: the separator, tool results, the next
assistant header. It is read off the template itself, applied to the whole conversation after every
turn, and not written down here for a model family. Where the template would change what was
sampled, the conversation goes on in a new segment, rendered as the template wants it, in which the
turns that it leaves alone keep the ids that the model generated.
"""

from agentrl.rollout.chat.conversation import Continuation, Conversation, Drift, Entry
from agentrl.rollout.chat.renderer import ChatRenderer, TemplateRefusal, ToolSchema
from agentrl.rollout.chat.turns import Message

__all__ = [
    "ChatRenderer",
    "Continuation",
    "Conversation",
    "Drift",
    "Entry",
    "Message",
    "TemplateRefusal",
    "ToolSchema",
]
