"""The parsers by their names in `--tool_call_parser`."""

from collections.abc import Mapping

from agentrl.rollout.tool_calls.calls import ToolCallParser
from agentrl.rollout.tool_calls.deepseekv3 import parse_deepseekv3
from agentrl.rollout.tool_calls.gemma4 import parse_gemma4
from agentrl.rollout.tool_calls.glm45 import parse_glm45
from agentrl.rollout.tool_calls.gpt_oss import parse_gpt_oss
from agentrl.rollout.tool_calls.kimi_k2 import parse_kimi_k2
from agentrl.rollout.tool_calls.llama3 import parse_llama3
from agentrl.rollout.tool_calls.minicpm import parse_minicpm
from agentrl.rollout.tool_calls.mistral import parse_mistral
from agentrl.rollout.tool_calls.pythonic import parse_pythonic
from agentrl.rollout.tool_calls.qwen import parse_qwen
from agentrl.rollout.tool_calls.qwen3_coder import parse_qwen3_coder

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
    "gemma4": parse_gemma4,
}

_PYTHON_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "<|python_end|>")

# Texts at which calls may begin. The content of a turn begins with what comes before the first of
# them, apart from white space. Of a parser that is not here, content is told as a whole only.
CALL_STARTS: Mapping[str, tuple[str, ...]] = {
    "qwen25": ("<tool_call>",),
    "qwen": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", "{", "["),
    "deepseekv3": ("<｜tool▁call",),
    "pythonic": (*_PYTHON_MARKS, "["),
    "kimi_k2": ("<|tool_call",),
    "glm45": ("<tool_call>",),
    "minicpm": ("<|tool_call_start|>", "<function name="),
    "gemma4": ("<|tool_call>",),
}

DEFAULT_PARSER = "qwen25"  # for models whose chat template writes no calls


def tool_call_parser(name: str) -> ToolCallParser:
    """The parser with this name in `--tool_call_parser`. Raises ValueError for an unknown name."""
    parser = PARSERS.get(name)
    if parser is None:
        raise ValueError(f"unknown tool call parser {name!r}; known: {', '.join(sorted(PARSERS))}")
    return parser
