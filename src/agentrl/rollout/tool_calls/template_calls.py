"""Which parser reads the tool calls of a model: what its chat template shows, and what is taken.

The template is made to write a call. The parsers that read it back fit. Where none does, or the
template writes no call, one is taken nevertheless, and a sentence says what speaks against it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from jinja2 import TemplateError

from agentrl.rollout.tool_calls.calls import ParsedCall, ToolCallParser
from agentrl.rollout.tool_calls.parser_registry import (
    CALL_STARTS,
    DEFAULT_PARSER,
    PARSERS,
    tool_call_parser,
)

_LONGEST_EXCERPT = 160  # characters

_PROBE_QUESTION = "probe-question"
# Mistral's templates require nine letters and digits. Kimi's write a call's id without its name.
_PROBE_IDS = ("call00001", "functions.probe_tool:0")
_PROBE_CALL = ParsedCall("probe_tool", {"text": "a probe", "count": 7})
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_CALL.name,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "count": {"type": "integer", "description": "A number."},
            },
            "required": ["text", "count"],
        },
    },
}

# Messages and tools, rendered by the chat template.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class TemplateCalls:
    """How a chat template writes tool calls.

    parsers: names of the parsers that read its calls
    written: a probe call as the template writes it; "" if it writes none
    """

    parsers: tuple[str, ...] = ()
    written: str = ""


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """The chosen parser.

    sentence: why it was chosen, or what is wrong with it
    certain: whether nothing is wrong with it
    unread: whether the template writes calls that it cannot read
    """

    name: str
    sentence: str
    certain: bool
    unread: bool = False

    @property
    def parse(self) -> ToolCallParser:
        """The parser."""
        return tool_call_parser(self.name)

    @property
    def starts(self) -> tuple[str, ...]:
        """Texts at which calls may begin (`parser_registry.CALL_STARTS`). "" may be anywhere."""
        return CALL_STARTS.get(self.name, ("",))


def choose_parser(wanted: str | None, calls: TemplateCalls, writes_tools: bool) -> ParserChoice:
    """The parser `wanted`, else the first one that reads the template's calls.

    `writes_tools`: whether the template describes tools to the model. Raises ValueError for an
    unknown name.
    """
    name = wanted or next(iter(calls.parsers), DEFAULT_PARSER)
    tool_call_parser(name)
    as_asked = ", as --tool_call_parser says" if wanted else ""
    if name in calls.parsers:
        return ParserChoice(name, f"its tool calls are read by the parser {name}{as_asked}", True)
    if calls.parsers:
        return ParserChoice(
            name,
            f"--tool_call_parser {name} cannot read the tool calls that the chat template writes, "
            f"as {calls.written!r}: {' or '.join(calls.parsers)} can",
            certain=False,
            unread=True,
        )
    if calls.written:
        return ParserChoice(
            name,
            f"the chat template writes tool calls as {calls.written!r}, which no parser reads: "
            + (
                f"--tool_call_parser {name} reads only what a model writes otherwise"
                if wanted
                else "a model that writes them so makes no calls. Choose a --tool_call_parser if "
                f"this model writes them otherwise; until then {name} is taken"
            ),
            certain=False,
            unread=True,
        )
    if wanted:
        return ParserChoice(
            name,
            f"the chat template writes no tool calls; they are read by the parser {name}{as_asked}",
            True,
        )
    if writes_tools:
        return ParserChoice(
            name,
            "the chat template describes tools but writes no tool calls, so that it does not show "
            f"how the model writes them: the parser {name} is taken, unless --tool_call_parser "
            "names another one",
            certain=False,
        )
    return ParserChoice(
        name,
        "the chat template knows no tools: they are described in the system message, with calls "
        f"as the parser {name} reads them",
        True,
    )


def calls_of_template(render: Render) -> TemplateCalls:
    """How the template writes tool calls, found by rendering one.

    Most templates take arguments as an object, some as JSON text.
    """
    forms = (_PROBE_CALL.arguments, '{"text": "a probe", "count": 7}')
    question: dict[str, Any] = {"role": "user", "content": _PROBE_QUESTION}
    asked = _try(render, [question])
    written = ""
    for call_id, arguments in product(_PROBE_IDS, forms):
        call = {"name": _PROBE_CALL.name, "arguments": arguments}
        turn = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": call_id, "function": call}],
        }
        text = _try(render, [question, turn])
        after = text.partition(_PROBE_QUESTION)[2]
        if fitting := _parsers_reading(after):
            return TemplateCalls(fitting, _excerpt(text, asked))
        if _PROBE_CALL.name in after and _PROBE_CALL.arguments["text"] in after:
            written = written or _excerpt(text, asked)
    return TemplateCalls(written=written)


def _try(render: Render, messages: list[dict[str, Any]]) -> str:
    """The rendered text; "" if the template rejects the messages."""
    try:
        return render(messages, [_PROBE_TOOL])
    except (TemplateError, TypeError, ValueError):
        return ""


def _excerpt(text: str, asked: str) -> str:
    """The text after the question, shortened for a sentence."""
    pairs = enumerate(zip(text, asked, strict=False))
    shared = next((i for i, (one, other) in pairs if one != other), len(asked))
    turn = text[shared:].strip()
    return turn if len(turn) <= _LONGEST_EXCERPT else f"{turn[:_LONGEST_EXCERPT]}..."


def _parsers_reading(turn: str) -> tuple[str, ...]:
    """The parsers that find the probe's call in a turn and leave the least text as content."""
    turns = {name: parse(turn, [_PROBE_TOOL]) for name, parse in PARSERS.items()}
    left = {
        name: len(parsed.content)
        for name, parsed in turns.items()
        if parsed.calls == (_PROBE_CALL,)
    }
    return tuple(name for name, length in left.items() if length == min(left.values()))
