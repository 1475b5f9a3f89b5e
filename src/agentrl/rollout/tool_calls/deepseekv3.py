"""DeepSeek V3, R1 and V3.1: calls between special tokens, arguments as JSON.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>stock
    ```json
    {"bin": "B7"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 leaves the word and the fence out: `...begin｜>stock<｜tool▁sep｜>{"bin": "B7"}<｜tool...`.
"""

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedTurn, Tools
from agentrl.rollout.tool_calls.json_text import read_arguments
from agentrl.rollout.tool_calls.sections import read_section

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_ELEMENT = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"


def parse_deepseekv3(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of DeepSeek V3 or V3.1."""
    return read_section(text, _SECTION, _ELEMENT, _read_call)


def _read_call(body: str) -> Call:
    head, separated, tail = body.partition(_SEPARATOR)
    if not separated:
        return MalformedCall(f"the tool call has no {_SEPARATOR} before its name or arguments")
    if tail.lstrip().startswith("{"):
        return read_arguments(head.strip(), tail)
    name, _, fenced = tail.strip().partition("\n")
    fenced = fenced.strip()
    if not (fenced.startswith("```json") and fenced.endswith("```") and len(fenced) > 9):
        return MalformedCall(
            "the arguments of the tool call do not stand between ```json and ``` on the lines "
            "after its name"
        )
    return read_arguments(name.strip(), fenced[len("```json") : -len("```")])
