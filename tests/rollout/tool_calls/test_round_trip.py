"""What is written as a family writes it is read back; what is not never raises."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bson
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template
from writers import MARKS, WRITERS, Calls, dumps, tools_for

from agentrl.rollout.tool_calls import (
    PARSERS,
    ParsedCall,
    TemplateCalls,
    calls_of_template,
    tool_call_parser,
)

spec = find_spec("trl")  # found, not imported: its templates are all that is wanted
assert spec is not None and spec.origin is not None, "trl is not installed"
TEMPLATES = Path(spec.origin).parent / "chat_templates"

FEW = settings(
    max_examples=settings.default.max_examples * 2 // 5
)  # of each; tests/fuzz goes through many more
ONCE_EACH = [name for name in PARSERS if name != "qwen"]  # which is qwen25

# Families' templates, with the most calls that they write in a turn.
FAMILIES = {
    "qwen2_5": ("qwen25", 4),
    "qwen3": ("qwen25", 4),
    "qwen3_instruct_2507": ("qwen25", 4),
    "qwen3_5_think": ("qwen3_coder", 4),
    "qwen3_5_nothink": ("qwen3_coder", 4),
    "qwen3_6": ("qwen3_coder", 4),
    "nemotron_3_nano": ("qwen3_coder", 4),
    "glm4moe": ("glm45", 4),
    "deepseekv3": ("deepseekv3", 4),
    "llama3_1": ("llama3", 1),
    "llama3_2": ("llama3", 1),
    "gptoss": ("gpt-oss", 1),
    "lfm2_v2": ("pythonic", 4),
    "lfm2_2_5": ("pythonic", 4),
    "gemma4": ("gemma4", 4),
    "gemma4_v2": ("gemma4", 4),
    "gemma4_v3": ("gemma4", 4),
    "gemma4_v4": ("gemma4", 4),
    "gemma4_v5": ("gemma4", 4),
    "diffusion_gemma": ("gemma4", 4),
}

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("true", "false", "null")
)
# No text that the families cannot write: their own marks, and half characters.
TEXTS = st.text(st.characters(exclude_characters="<]", exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(ParsedCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=4)),
    min_size=1,
    max_size=4,
    unique_by=lambda call: call.name,
)


@pytest.mark.parametrize(("parser", "write"), WRITERS, ids=[write.__name__ for _, write in WRITERS])
@given(calls=CALLS)
@FEW
def test_calls_are_read_as_they_were_written(
    parser: str, write: Callable[[Calls], str], calls: list[ParsedCall]
) -> None:
    turn = tool_call_parser(parser)(write(calls), tools_for(calls))
    assert turn.calls == tuple(calls)
    assert turn.content == ""


@pytest.mark.parametrize(("parser", "write"), WRITERS, ids=[write.__name__ for _, write in WRITERS])
def test_text_around_calls_is_kept(parser: str, write: Callable[[Calls], str]) -> None:
    calls = [ParsedCall("stock", {"bin": "B7"}), ParsedCall("now", {})]
    before, after = "I look.\n", "\nThen I wait."
    if parser == "gpt-oss":
        before = f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant"
        after = f"<|start|>assistant<|channel|>final<|message|>{after}"
    turn = tool_call_parser(parser)(before + write(calls) + after, tools_for(calls))
    assert turn.calls == tuple(calls)
    assert turn.content.split() == ["I", "look.", "Then", "I", "wait."]


@pytest.mark.parametrize(("parser", "write"), WRITERS, ids=[write.__name__ for _, write in WRITERS])
def test_a_turn_that_is_cut_off_gives_no_call_that_was_not_written(
    parser: str, write: Callable[[Calls], str]
) -> None:
    calls = (ParsedCall("stock", {"bin": "B7", "deep": {"a": [1, "x"]}}), ParsedCall("now", {}))
    text = write(calls)
    for end in range(len(text)):
        turn = tool_call_parser(parser)(text[:end], tools_for(calls))
        made = [call for call in turn.calls if isinstance(call, ParsedCall)]
        assert made == list(calls[: len(made)]), text[:end]


@cache
def source_of(template: str) -> str:
    return (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")


def render(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """A conversation by a template of trl."""
    texts, _ = render_jinja_template(
        [messages],
        chat_template=source_of(template),
        tools=tools,
        bos_token="<s>",
        eos_token="</s>",
    )
    return texts[0]


@pytest.mark.parametrize("template", FAMILIES)
@given(calls=CALLS)
@FEW
def test_calls_that_the_family_s_own_template_writes_are_read_back(
    template: str, calls: list[ParsedCall]
) -> None:
    parser, most = FAMILIES[template]
    calls = calls[:most]
    as_text = template == "deepseekv3"  # its template takes arguments as JSON text
    messages = [
        {"role": "user", "content": "The question."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": dumps(call.arguments) if as_text else call.arguments,
                    },
                }
                for call in calls
            ],
        },
    ]
    text = render(template, messages, tools_for(calls)).partition("The question.")[2]
    assert tool_call_parser(parser)(text, tools_for(calls)).calls == tuple(calls)


@pytest.mark.parametrize("template", FAMILIES)
def test_a_template_shows_which_parser_reads_it(template: str) -> None:
    found = calls_of_template(lambda messages, tools: render(template, messages, tools))
    fitting = found.parsers
    assert "probe_tool" in found.written
    assert fitting[0] == FAMILIES[template][0]
    assert len({PARSERS[name] for name in fitting}) == 1


@pytest.mark.parametrize("template", ["gemma3", "phi3", "cohere", "lfm2"])
def test_a_template_that_writes_no_calls_shows_no_parser(template: str) -> None:
    found = calls_of_template(lambda messages, tools: render(template, messages, tools))
    assert found == TemplateCalls()


def test_a_template_may_write_calls_that_no_parser_reads() -> None:
    found = calls_of_template(lambda messages, tools: render("muse_glimmer", messages, tools))
    assert found.parsers == ()
    assert '<atem:invoke name="probe_tool">' in found.written


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A turn with calls, with pieces cut out, put in or moved."""
    _, write = draw(st.sampled_from(WRITERS))
    text = draw(TEXTS) + write(draw(CALLS)) + draw(TEXTS)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 30)))
        kept = draw(st.sampled_from(["", text[start:end] * 2]))
        text = text[:start] + kept + draw(st.sampled_from(["", *MARKS])) + text[end:]
    return text


ANY_TEXT = mutated() | st.lists(st.sampled_from(MARKS) | st.text(max_size=8), max_size=16).map(
    "".join
)


@pytest.mark.parametrize("parser", ONCE_EACH)
@given(text=ANY_TEXT)
@FEW
def test_any_text_is_parsed_without_an_error_into_calls_that_mongodb_can_store(
    parser: str, text: str
) -> None:
    turn = PARSERS[parser](text)
    turn.content.encode()
    for call in turn.calls:
        if isinstance(call, ParsedCall):
            bson.encode(call.arguments)
            orjson.dumps(call.arguments)
            assert call.name.encode()
        else:
            assert call.error and "\n" not in call.error


# Each began to take a second or more, or would with a careless regular expression.
HOSTILE = [
    "<tool_call>", "<tool_call>{", '<tool_call>{"', "<tool_call><function=f><parameter=a>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_key><arg_value>", "</parameter> ",
    "[TOOL_CALLS][", '[TOOL_CALLS]f[ARGS]{"', '{"name": "f", "parameters": {\n', '\\"', '{"', "[[",
    '\n[{"name":', "<|python_tag|>", "<｜tool▁call▁begin｜><｜tool▁sep｜>",
    "<|tool_call_begin|>f:0", "<|start|>assistant<|channel|>", "<|message|>", "\n[f(",
    "\n[f(a='", '\n[f(a="""', "[f(a=[[[[", "<|tool_call_start|>",
    "<|tool_call>call:f{", "<|tool_call>call:f{a:", '<|tool_call>call:f{a:<|"|>', "a:{", "a:[",
    "a:1,", "<|channel>", "<channel|>", "<tool_call|>",
    "<|tool_call_start|>```python\nf(", '<function name="f"><param name="a">', "</param> ",
    "<think>", "</think>", " ", "\n", "\t[", "-", "(", "9",
]  # fmt: skip


@pytest.mark.parametrize("parser", ONCE_EACH)
@pytest.mark.parametrize("unit", HOSTILE)
def test_a_long_hostile_text_is_parsed_before_the_test_s_time_is_over(
    parser: str, unit: str
) -> None:
    body = unit * (100_000 // len(unit))
    PARSERS[parser](body)
    for opening in ("<tool_call>", "<|tool_call_start|>[f(a=", '[TOOL_CALLS][{"name":"'):
        PARSERS[parser](opening + body + "</tool_call>")
    PARSERS[parser]("<|tool_call>call:f{a:" + body + "<tool_call|>")
