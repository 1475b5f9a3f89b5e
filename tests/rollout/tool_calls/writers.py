"""Each family's way of writing calls, the other way round: from calls to a turn's text.

For properties (`test_round_trip.py`) and the fuzz program (`tests/fuzz/tool_calls.py`).
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.rollout.tool_calls import ParsedCall

Calls = Sequence[ParsedCall]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: object) -> str:
    """A value as families write it that mark no strings."""
    return value if isinstance(value, str) else dumps(value)


def qwen(calls: Calls) -> str:
    bodies = (dumps({"name": call.name, "arguments": call.arguments}) for call in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def qwen3_coder(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(
            f"<parameter={key}>\n{bare(value)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    )


def glm45(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def mistral_array(calls: Calls) -> str:
    array = [
        {"name": call.name, "arguments": call.arguments, "id": f"call{index:05}"}
        for index, call in enumerate(calls)
    ]
    return f"[TOOL_CALLS] {dumps(array)}"


def mistral_args(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{dumps(call.arguments)}" for call in calls)


def mistral_call_id(calls: Calls) -> str:
    return "".join(
        f"[TOOL_CALLS]{call.name}[CALL_ID]a1b2c3d4e[ARGS]{dumps(call.arguments)}" for call in calls
    )


def llama3(calls: Calls) -> str:
    return "; ".join(dumps({"name": call.name, "parameters": call.arguments}) for call in calls)


def llama3_tagged(calls: Calls) -> str:
    return f"<|python_tag|>{llama3(calls)}"


def deepseekv3(calls: Calls) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
        f"{dumps(call.arguments)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseekv31(calls: Calls) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{dumps(call.arguments)}<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>"
        f"{dumps(call.arguments)}<|tool_call_end|>"
        for index, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def gpt_oss(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{dumps(call.arguments)}<|call|>"
        for call in calls
    )


def _python(call: ParsedCall, literal: Callable[[object], str]) -> str:
    arguments = (f"{key}={literal(value)}" for key, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def pythonic(calls: Calls) -> str:
    return f"[{', '.join(_python(call, repr) for call in calls)}]"


def pythonic_marked(calls: Calls) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def minicpm3(calls: Calls) -> str:
    lines = "".join(f"{_python(call, dumps)}\n" for call in calls)
    return f"<|tool_call_start|>\n```python\n{lines}```\n<|tool_call_end|>"


def minicpm_elements(calls: Calls) -> str:
    return "\n".join(
        f'<function name="{call.name}">'
        + "".join(
            f'<param name="{key}"><![CDATA[{bare(value)}]]></param>'
            for key, value in call.arguments.items()
        )
        + "</function>"
        for call in calls
    )


_GEMMA_QUOTE = '<|"|>'


def _gemma_value(value: object) -> str:
    """Strings between tokens of their own, keys bare, the rest as JSON."""
    if isinstance(value, str):
        return f"{_GEMMA_QUOTE}{value}{_GEMMA_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return dumps(value)


def gemma4(calls: Calls) -> str:
    return "".join(
        f"<|tool_call>call:{call.name}{_gemma_value(call.arguments)}<tool_call|>" for call in calls
    )


# Parser, and a way of writing that it reads.
WRITERS: tuple[tuple[str, Callable[[Calls], str]], ...] = (
    ("qwen25", qwen),
    ("qwen3_coder", qwen3_coder),
    ("glm45", glm45),
    ("mistral", mistral_array),
    ("mistral", mistral_args),
    ("mistral", mistral_call_id),
    ("llama3", llama3),
    ("llama3", llama3_tagged),
    ("deepseekv3", deepseekv3),
    ("deepseekv3", deepseekv31),
    ("kimi_k2", kimi_k2),
    ("gpt-oss", gpt_oss),
    ("pythonic", pythonic),
    ("pythonic", pythonic_marked),
    ("minicpm", minicpm3),
    ("minicpm", minicpm_elements),
    ("gemma4", gemma4),
)

# What families write around names and values.
MARKS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "[THINK]", "[/THINK]", "<|python_tag|>", '{"name": "f", "parameters": ', '{"name":',
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```json\n", "```", "```python\n",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "functions.f:0", "<|start|>", "<|end|>", "<|call|>",
    "<|return|>", "<|channel|>", "<|constrain|>", "<|message|>", "assistant", "commentary",
    "analysis", "final", " to=functions.f ", "<|tool_call_start|>", "<|python_start|>",
    "<|python_end|>", '<function name="', "<param name='", '<param name="k">', "</param>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>thought\n", "<channel|>", "call:f{", "a:",
    "<![CDATA[", "]]>", "<think>", "</think>", "[f(", "f(", "a=", "a='", 'a="', "'''", '"""', "\\",
    '"', "'", "{", "}", "[", "]", "(", ")", ",", ":", ";", "=", ">", "-", "1", "9" * 30, "1e999",
    "true", "None", " ", "\n", "\t", "\0", "\\u", "\\ud800", "é", "😀",
)  # fmt: skip


def tools_for(calls: Calls) -> list[dict[str, Any]]:
    """Schemas of tools that take these calls."""
    return [
        {
            "type": "function",
            "function": {
                "name": call.name,
                "description": "A tool.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": json_type(value), "description": "A value."}
                        for key, value in call.arguments.items()
                    },
                    "required": [],
                },
            },
        }
        for call in calls
    ]


def json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
