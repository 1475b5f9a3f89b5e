"""gpt-oss: messages with a channel and a recipient (OpenAI's harmony format), arguments as JSON.

    <|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary
    to=functions.stock <|constrain|>json<|message|>{"bin": "B7"}<|call|>

A message to a recipient is a call, on any channel; `<|call|>` ends the turn, so its text does not
hold it. Content is what is said to the user, on the channels `final` and `commentary`; `analysis`
is the thought.
"""

import re

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedTurn, Tools
from agentrl.rollout.tool_calls.json_text import read_arguments

_HEADER_MARK = re.compile(r"<\|(?:start|channel|constrain)\|>")
_MESSAGE = "<|message|>"
_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_THOUGHT = "analysis"


def parse_gpt_oss(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of gpt-oss."""
    content: list[str] = []
    calls: list[Call] = []
    position = 0
    while position < len(text):
        end = _END.search(text, position)
        message = text[position : end.start() if end else len(text)]
        position = end.end() if end else len(text)
        header, has_body, body = message.partition(_MESSAGE)
        if not has_body and not _HEADER_MARK.search(header):
            content.append("" if header.strip() == "assistant" else header.strip())
            continue
        words = _HEADER_MARK.sub(" ", header).split()
        recipient = next((word[3:] for word in words if word.startswith("to=")), None)
        if recipient is not None:
            calls.append(_read_call(recipient, body if has_body else None))
        elif _THOUGHT not in words:
            content.append(body.strip())
    return ParsedTurn("\n".join(filter(None, content)), tuple(calls))


def _read_call(recipient: str, body: str | None) -> Call:
    if body is None:
        return MalformedCall(f"the tool call to={recipient} has no {_MESSAGE} with its arguments")
    return read_arguments(recipient.removeprefix("functions."), body)
