"""Whether the prompt of a turn has all that is said to the model.

Seen by marks around the contents: to look for a content would find it in another, and not find it
where the template escapes it.
"""

from agentrl.rollout.chat import Conversation

_BEGIN, _END = "probe-{}-begins", "probe-{}-ends"


def refuse_left_out(conversation: Conversation, first: int) -> None:
    """Raise `ValueError` if the next prompt lacks a message, of those from index `first` on.

    The sentence names the message by its number, counted from 1. Blank messages may be left out.
    """
    said = {
        at: entry.message["content"]
        for at, entry in enumerate(conversation.entries)
        if at >= first and entry.message["content"].strip()
    }
    if not said:
        return
    marked = {
        at: f"{_BEGIN.format(at)} {content} {_END.format(at)}" for at, content in said.items()
    }
    text = conversation.render_other(marked)
    for at, content in said.items():
        if not (_BEGIN.format(at) in text and _END.format(at) in text):
            raise ValueError(
                f"message {at + 1}: the chat template leaves out {content.strip()[:60]!r}"
            )
