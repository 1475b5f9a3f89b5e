"""What was said in a Record, in order, as texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.databases.documents import DispatchedSamplingTask, ToolCall


@dataclass(frozen=True)
class Said:
    """A part of a conversation. `role`: of a message, or `call` for a tool call and its result."""

    turn: int
    role: str
    text: str


def conversation(turns: Sequence[DispatchedSamplingTask]) -> list[Said]:
    """The parts, in order. The result of a call stands with it, and not again as a message."""
    said: list[Said] = []
    answered = True
    for turn in turns:
        for message in turn.messages:
            role = str(message.get("role"))
            if role != "tool" or not answered:
                said.append(Said(turn.turn, role, str(message.get("content") or "")))
        said.append(Said(turn.turn, "assistant", turn.output_text))
        said += [
            Said(turn.turn, "call", _with_result(call)) for call in turn.tool_calls if call.name
        ]
        # Calls that a program made itself: their results are messages of a later turn.
        answered = all(call.result is not None for call in turn.tool_calls)
    return said


def call_text(call: ToolCall) -> str:
    """A call as it would be written in Python, without its result."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def _with_result(call: ToolCall) -> str:
    result = "" if call.result is None else f"  ⇒  {call.result}"
    return call_text(call) + result
