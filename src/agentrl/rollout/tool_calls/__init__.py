"""Tool calls in a model's text: parsing, for the ways in which model families write them.

    parser_registry.py                the parsers by name
    template_calls.py                 which of them a chat template fits, and which is taken
    calls.py                          what a parser gives: content, calls, calls that cannot be made
    elements.py json_text.py          what several families share: marked elements, JSON,
    python_calls.py typed_text.py     Python calls, untyped text read by a tool's schema
    qwen.py mistral.py ...            a file for each way of writing

A parser is a function of the turn's text, special tokens included and the stop token left out, and
of the tools' schemas. It never raises and takes time in proportion to the text: a call that cannot
be read becomes a `MalformedCall` whose message is for the model to read. Whether a tool exists is
not known here.
"""

from agentrl.rollout.tool_calls.calls import (
    Call,
    MalformedCall,
    ParsedCall,
    ParsedTurn,
    ToolCallParser,
    tool_names,
)
from agentrl.rollout.tool_calls.parser_registry import PARSERS, tool_call_parser
from agentrl.rollout.tool_calls.template_calls import (
    ParserChoice,
    TemplateCalls,
    calls_of_template,
    choose_parser,
)

__all__ = [
    "PARSERS",
    "Call",
    "MalformedCall",
    "ParsedCall",
    "ParsedTurn",
    "ParserChoice",
    "TemplateCalls",
    "ToolCallParser",
    "calls_of_template",
    "choose_parser",
    "tool_call_parser",
    "tool_names",
]
