"""The parsers by their names in `--tool_call_parser`, and which of them a chat template fits."""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from jinja2 import TemplateError

from agentrl.rollout.tool_calls.calls import ParsedCall, ToolCallParser
from agentrl.rollout.tool_calls.deepseekv3 import parse_deepseekv3
from agentrl.rollout.tool_calls.glm45 import parse_glm45
from agentrl.rollout.tool_calls.gpt_oss import parse_gpt_oss
from agentrl.rollout.tool_calls.kimi_k2 import parse_kimi_k2
from agentrl.rollout.tool_calls.llama3 import parse_llama3
from agentrl.rollout.tool_calls.minicpm import parse_minicpm
from agentrl.rollout.tool_calls.mistral import parse_mistral
from agentrl.rollout.tool_calls.pythonic import parse_pythonic
from agentrl.rollout.tool_calls.qwen import parse_qwen
from agentrl.rollout.tool_calls.qwen3_coder import parse_qwen3_coder

log = logging.getLogger(__name__)

PARSERS: Mapping[str, ToolCallParser] = {
    "qwen25": parse_qwen,
    "qwen": parse_qwen,
    "qwen3_coder": parse_qwen3_coder,
    "mistral": parse_mistral,
    "llama3": parse_llama3,
    "deepseekv3": parse_deepseekv3,
    "pythonic": parse_pythonic,
    "kimi_k2": parse_kimi_k2,
    "glm45": parse_glm45,
    "gpt-oss": parse_gpt_oss,
    "minicpm": parse_minicpm,
}

DEFAULT_PARSER = "qwen25"  # of a model whose chat template writes no calls

_PROBE_QUESTION = "probe-question"
# Nine letters and digits: Mistral's templates insist. Kimi's name a call by its id alone.
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


def tool_call_parser(name: str) -> ToolCallParser:
    """The parser of a model family, by its name in `--tool_call_parser`.

    Raises ValueError with the known names.
    """
    parser = PARSERS.get(name)
    if parser is None:
        raise ValueError(f"unknown tool call parser {name!r}; known: {', '.join(sorted(PARSERS))}")
    return parser


def choose_parser(wanted: str | None, fitting: Sequence[str]) -> ToolCallParser:
    """The parser asked for, or else the first of `fitting`, those that `parsers_of_template` found.

    A template that writes no calls leaves Qwen's. Raises ValueError for an unknown name.
    """
    name = wanted or next(iter(fitting), DEFAULT_PARSER)
    if fitting and name not in fitting:
        log.warning(
            "--tool_call_parser %s cannot read what the model's chat template writes; %s can",
            name,
            " or ".join(fitting),
        )
    log.info("tool calls are read by the parser %s", name)
    return tool_call_parser(name)


def parsers_of_template(render: Render) -> tuple[str, ...]:
    """The parsers that read a call as the chat template itself writes it, by name.

    None of them if the template does not write calls. Most templates take arguments as an object,
    some as JSON text.
    """
    forms = (_PROBE_CALL.arguments, '{"text": "a probe", "count": 7}')
    for call_id, arguments in product(_PROBE_IDS, forms):
        call = {"name": _PROBE_CALL.name, "arguments": arguments}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _PROBE_QUESTION},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "id": call_id, "function": call}],
            },
        ]
        try:
            text = render(messages, [_PROBE_TOOL])
        except (TemplateError, TypeError, ValueError):  # what templates raise at what they refuse
            continue
        fitting = _parsers_reading(text.partition(_PROBE_QUESTION)[2])
        if fitting:
            return fitting
    return ()


def _parsers_reading(turn: str) -> tuple[str, ...]:
    """The parsers that find the probe's call in a turn and leave the least text around it."""
    turns = {name: parse(turn, [_PROBE_TOOL]) for name, parse in PARSERS.items()}
    left = {
        name: len(parsed.content)
        for name, parsed in turns.items()
        if parsed.calls == (_PROBE_CALL,)
    }
    return tuple(name for name, length in left.items() if length == min(left.values()))
