"""What single families write: thoughts, untyped text, ids, and what is told of a malformed call."""

from collections.abc import Callable

import pytest

from agentrl.rollout.tool_calls import (
    MalformedCall,
    ParsedCall,
    TemplateCalls,
    choose_parser,
    tool_call_parser,
)

Write = Callable[[str, str], str]

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "$defs": {"Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]}},
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": ["number", "null"]},
                "flag": {"type": "boolean"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "either": {"type": ["string", "integer"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "size": {"enum": [1, 2, 3]},
                "loop": {"$ref": "#/$defs/Loop"},
                "odd": {"$ref": "#/nowhere", "type": 3},
            },
        },
    },
}


def coder(key: str, value: str) -> str:
    inside = f"<parameter={key}>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


def glm(key: str, value: str) -> str:
    inside = f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    return f"<tool_call>f\n{inside}</tool_call>"


def minicpm(key: str, value: str) -> str:
    return f'<function name="f"><param name="{key}"><![CDATA[{value}]]></param></function>'


UNTYPED = [("qwen3_coder", coder), ("glm45", glm), ("minicpm", minicpm)]


@pytest.mark.parametrize(("parser", "write"), UNTYPED, ids=[name for name, _ in UNTYPED])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "7", "7"),
        ("text", "  two\nlines ", "  two\nlines "),
        ("text", "null", "null"),
        ("text", '"quoted"', '"quoted"'),
        ("text", "x < y </parameter> </arg_value> </param> z", None),
        ("count", "7", 7),
        ("count", " 7.0 ", 7),
        ("ratio", "7", 7),
        ("ratio", "None", ()),
        ("flag", "True", True),
        ("flag", "false", False),
        ("maybe", "None", ()),
        ("maybe", "some", "some"),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("size", "2", 2),
        ("loop", "2", 2),
        ("odd", "2", 2),
        ("unknown", "2", 2),
        ("unknown", "{'a'", "{'a'"),
        ("unknown", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_untyped_text_is_read_by_the_tool_s_schema(
    parser: str, write: Write, key: str, text: str, value: object
) -> None:
    wanted = text if value is None else None if value == () else value
    (call,) = tool_call_parser(parser)(write(key, text), [TOOL]).calls
    assert call == ParsedCall("f", {key: wanted})
    assert type(call.arguments[key]) is type(wanted)


@pytest.mark.parametrize(("parser", "write"), UNTYPED, ids=[name for name, _ in UNTYPED])
@pytest.mark.parametrize(
    ("key", "text", "error"),
    [
        ("count", "many", "'count' of the tool call must be integer in JSON, not 'many'"),
        ("flag", "1", "'flag' of the tool call must be boolean"),
        ("ratio", "half", "must be null or number"),
        ("tags", "['a']", "must be array in JSON"),
        ("count", "9" * 19, "64 bits"),
    ],
)
def test_text_of_the_wrong_type_is_told_with_the_right_one(
    parser: str, write: Write, key: str, text: str, error: str
) -> None:
    (call,) = tool_call_parser(parser)(write(key, text), [TOOL]).calls
    assert isinstance(call, MalformedCall)
    assert error in call.error


@pytest.mark.parametrize(("parser", "write"), UNTYPED, ids=[name for name, _ in UNTYPED])
def test_a_value_may_hold_the_text_of_the_element_s_own_end(parser: str, write: Write) -> None:
    text = "</tool_call> and </function> and </parameter>"
    if parser == "minicpm":
        text = "</function> and </param> and x"
    (call,) = tool_call_parser(parser)(write("text", text), [TOOL]).calls
    assert call == ParsedCall("f", {"text": text})


@pytest.mark.parametrize(
    ("parser", "text", "error"),
    [
        ("qwen25", '<tool_call>{"name": "a"}\n<tool_call>{"name": ]</tool_call>', "not closed"),
        ("qwen3_coder", "<tool_call>\nf\n</tool_call>", "does not begin with <function=NAME>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>", "not closed with </function>"),
        (
            "qwen3_coder",
            "<tool_call><function=f>some text</function></tool_call>",
            "holds 'some text' where <parameter=NAME>",
        ),
        ("qwen3_coder", coder("a", "1</parameter><parameter=a>2"), "the parameter 'a' twice"),
        (
            "qwen3_coder",
            "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            "does not stand inside <tool_call>",
        ),
        ("glm45", '<tool_call>\n{"name": "f"}\n</tool_call>', '\'{"name": "f"}\''),
        ("glm45", "<tool_call><arg_key>a</arg_key></tool_call>", "begin with the tool's name"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", "<arg_value>VALUE"),
        ("mistral", "[TOOL_CALLS]", "no JSON array of calls"),
        ("mistral", '[TOOL_CALLS][{"name": "f"', "not valid JSON"),
        ("mistral", "[TOOL_CALLS][]", "is empty"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{a: 1}", "not valid JSON"),
        ("llama3", '{"name": "f", "parameters": {"a": 1}', "is not closed"),
        ("llama3", '{"name": "f", "parameters": [1]}', "not a JSON object"),
        ("llama3", "<|python_tag|>print(1)", "neither a JSON object nor a call"),
        ("deepseekv3", "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>", "holds no"),
        (
            "deepseekv3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>",
            "between ```json and ```",
        ),
        ("deepseekv3", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "has no <｜tool▁sep｜>"),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        (
            "kimi_k2",
            "<|tool_call_begin|>a b:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "must be functions.NAME:NUMBER, not 'a b:0'",
        ),
        ("gpt-oss", "<|channel|>commentary to=functions.f", "has no <|message|>"),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>", "has no arguments"),
        ("gpt-oss", "<|channel|>commentary to=python<|message|>print(1)", "not valid JSON"),
        ("pythonic", "[f(1)]", "NAME=VALUE in the arguments of f was expected instead of '1)]'"),
        ("pythonic", "[f(a=b)]", "a value was expected instead of 'b)]'"),
        ("pythonic", "[f(a=1, a=2)]", "given twice"),
        ("pythonic", "[f(a=" + "[" * 40, "too many levels"),
        ("pythonic", "[f(a=" + "9" * 30 + ")]", "64 bits"),
        ("pythonic", "[f(a=1e999)]", "too large"),
        ("pythonic", "[f(a='\\ud800')]", "half a character"),
        ("pythonic", "<|tool_call_start|>f()<|tool_call_end|>", "a list of calls"),
        ("minicpm", "<|tool_call_start|>f()<|tool_call_end|>", "between ```python and ```"),
        ("minicpm", "<function name=f></function>", "does not begin with <function name="),
        ("minicpm", '<function name="f">x</function>', "holds 'x' where <param"),
    ],
)
def test_a_malformed_call_says_what_was_wrong(parser: str, text: str, error: str) -> None:
    first = tool_call_parser(parser)(text).calls[0]
    assert isinstance(first, MalformedCall)
    assert error in first.error


def test_a_call_that_is_only_thought_of_is_not_made() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    parse = tool_call_parser("qwen25")
    thought = f"<think>I could write {call}.</think>\n"
    assert parse(thought + call).calls == (ParsedCall("f", {}),)
    assert parse(thought + call).content == thought.strip()
    begun_in_the_prompt = thought.removeprefix("<think>")
    assert parse(begun_in_the_prompt + call).calls == (ParsedCall("f", {}),)
    assert parse(f"<think>So I write {call}").calls == (ParsedCall("f", {}),)
    argument = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'
    assert parse(argument).calls == (ParsedCall("f", {"a": "</think>"}),)


def test_an_element_that_is_begun_anew_costs_only_the_first() -> None:
    turn = tool_call_parser("qwen25")('<tool_call>{"na\n<tool_call>{"name": "f"}</tool_call>')
    assert turn.calls == (
        MalformedCall("the tool call is not closed with </tool_call>"),
        ParsedCall("f", {}),
    )


def test_json_that_names_no_tool_is_an_answer_of_llama() -> None:
    parse = tool_call_parser("llama3")
    answer = '{"name": "Ada", "born": 1815}'
    assert (parse(answer).content, parse(answer).calls) == (answer, ())
    assert parse('{"name": "f"}', [TOOL]).calls == (ParsedCall("f", {}),)
    built_in = '<|python_tag|>brave_search.call(query="x")'
    assert parse(built_in).calls == (ParsedCall("brave_search", {"query": "x"}),)


def test_the_thought_of_gpt_oss_is_no_content_and_any_channel_may_call() -> None:
    turn = tool_call_parser("gpt-oss")(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis "
        'to=functions.f code<|message|>{"a": 1}'
    )
    assert (turn.content, turn.calls) == ("", (ParsedCall("f", {"a": 1}),))
    answer = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4"
    )
    assert tool_call_parser("gpt-oss")(answer).content == "4"


def test_python_strings_are_read_with_their_escapes() -> None:
    text = (
        r"""[f(a='it\'s\n\x41\u00e9\101\q', b="\ud83d\ude00", c='''x'y''', d={'k': (1, -.5)},)]"""
    )
    (call,) = tool_call_parser("pythonic")(text).calls
    assert call == ParsedCall(
        "f", {"a": "it's\nAéA\\q", "b": "😀", "c": "x'y", "d": {"k": [1, -0.5]}}
    )


def test_xml_entities_outside_cdata_are_replaced() -> None:
    text = '<function name="f"><param name="text"> a &lt; b &amp;&amp; c </param></function>'
    (call,) = tool_call_parser("minicpm")(text, [TOOL]).calls
    assert call == ParsedCall("f", {"text": "a < b && c"})


def test_the_parser_asked_for_goes_before_the_template_s() -> None:
    glm = TemplateCalls(("glm45",), "<tool_call>f")
    own = choose_parser(None, glm, writes_tools=True)
    assert own.parse is tool_call_parser("glm45") and own.certain
    other = choose_parser("qwen", glm, writes_tools=True)
    assert other.parse is tool_call_parser("qwen25") and other.unread and not other.certain
    assert "qwen cannot read the tool calls that the chat template writes" in other.sentence
    assert other.sentence.endswith("glm45 can")
    same = choose_parser("glm45", glm, writes_tools=True)
    assert same.certain and same.sentence.endswith("glm45, as --tool_call_parser says")
    with pytest.raises(ValueError, match="unknown tool call parser 'nobody'"):
        choose_parser("nobody", glm, writes_tools=True)


def test_no_parser_is_taken_silently_where_the_template_does_not_show_one() -> None:
    none = TemplateCalls()
    told = choose_parser(None, none, writes_tools=False)  # we describe the tools, and how to call
    assert (told.name, told.certain) == ("qwen25", True)
    assert "knows no tools" in told.sentence and "qwen25" in told.sentence
    guessed = choose_parser(None, none, writes_tools=True)
    assert (guessed.name, guessed.certain, guessed.unread) == ("qwen25", False, False)
    assert "does not show how the model writes them" in guessed.sentence
    assert choose_parser("pythonic", none, writes_tools=True).certain
    for wanted in (None, "pythonic"):
        unread = choose_parser(wanted, TemplateCalls((), "<call f>"), writes_tools=True)
        assert unread.unread and not unread.certain
        assert "writes tool calls as '<call f>', which no parser reads" in unread.sentence


GEMMA_STRING = '<|"|>'


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        # Google's own examples, and what vLLM's and SGLang's parsers read.
        (f"{{location:{GEMMA_STRING}London{GEMMA_STRING}}}", {"location": "London"}),
        ("{}", {}),
        ("{ n : 3 , x : -1.5e3 , t : true , f:false, z:null, o:None }",
         {"n": 3, "x": -1500.0, "t": True, "f": False, "z": None, "o": None}),
        (f"{{l:[1,{GEMMA_STRING}a,}}]{GEMMA_STRING},[]],d:{{k:{{}}}}}}",
         {"l": [1, "a,}]", []], "d": {"k": {}}}),
        (f"{{t:{GEMMA_STRING}a <tool_call|> b\n{GEMMA_STRING}}}", {"t": "a <tool_call|> b\n"}),
        (f"{{{GEMMA_STRING}a key{GEMMA_STRING}:1}}", {"a key": 1}),
        ('{city:New York, "k":"v\\n"}', {"city": "New York", "k": "v\n"}),
    ],
)  # fmt: skip
def test_gemma_4_s_values_are_read_with_their_types(arguments: str, read: object) -> None:
    (call,) = tool_call_parser("gemma4")(f"<|tool_call>call:f{arguments}<tool_call|>").calls
    assert call == ParsedCall("f", read)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("call:f(a)", "does not begin with call:NAME{, but with 'call:f(a)'"),
        (f"call:f{{a:{GEMMA_STRING}x}}", 'a string is not closed with <|"|>'),
        ("call:f{a:}", "a value was expected instead of '}'"),
        ("call:f{a 1}", "':' was expected after the key 'a 1'"),
        ("call:f{a:1,a:2}", "the key 'a' is given twice"),
        ("call:f{a:1}x", "holds 'x' after its last brace"),
        ("call:f{a:" + "9" * 30 + "}", "more than 64 bits"),
        ("call:f{a:" + "[" * 40 + "]" * 40 + "}", "too many levels of nesting"),
        ("call:f{a:1", "'}' was expected after the value of 'a' instead of the end of the call"),
    ],
)
def test_a_call_of_gemma_4_that_cannot_be_read_says_where(call: str, error: str) -> None:
    (read,) = tool_call_parser("gemma4")(f"<|tool_call>{call}<tool_call|>").calls
    assert isinstance(read, MalformedCall)
    assert error in read.error


def test_a_call_in_the_thought_of_gemma_4_is_not_made() -> None:
    thought = "<|channel>thought\nI may <|tool_call>call:f{}<tool_call|>.\n<channel|>"
    turn = tool_call_parser("gemma4")(thought + "<|tool_call>call:g{}<tool_call|>")
    assert turn.calls == (ParsedCall("g", {}),)
