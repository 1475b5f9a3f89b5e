"""A tokenizer with its chat template, shared by all conversations.

The template's capabilities are found by probing when it is loaded (`capabilities.py`).
`conversation.py` extends conversations turn by turn.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson
from jinja2 import TemplateError

from agentrl.importing import importing
from agentrl.rollout.chat.capabilities import (
    TemplateCapabilities,
    TemplateRefusal,
    probe_capabilities,
)
from agentrl.rollout.chat.escaping import EscapingCodec
from agentrl.rollout.chat.form_order import find_form_orders
from agentrl.rollout.chat.turns import Message, TurnReading, find_thought, read_turn
from agentrl.rollout.tool_calls import calls_of_template, choose_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {...}}, OpenAI's format

_CACHED_PROMPTS = 512
_END_OF_PROMPT = 32  # tokens that hold the mark of a thought


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered prompt: escaped text, token ids [n], and the escaped messages and tools."""

    text: str
    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None


class ChatRenderer:
    """A tokenizer with its chat template.

    Raises ValueError if the tokenizer or its chat template cannot be used for turns.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        stop_token_ids: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
        parser: str | None = None,
    ) -> None:
        """`stop_token_ids`: further tokens that end a turn, besides the tokenizer's and template's.

        `template_options`: variables of the template, such as `enable_thinking`. `parser`: name of
        the tool call parser; None: the one that fits the template.
        """
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._options = dict(template_options or {})
        self.codec = EscapingCodec(tokenizer.backend_tokenizer.to_str())
        self._prompts = lru_cache(maxsize=_CACHED_PROMPTS)(self._render_prompt)
        self.capabilities: TemplateCapabilities = probe_capabilities(self._apply, self.codec)
        self.parser_choice = choose_parser(
            parser, calls_of_template(self._apply), self.capabilities.writes_tools
        )
        self.parse_calls = self.parser_choice.parse
        log.log(
            logging.INFO if self.parser_choice.certain else logging.WARNING,
            "%s",
            self.parser_choice.sentence,
        )
        self.form_orders = find_form_orders(self)
        self.turn_end, self.turn_end_id = self.capabilities.turn_ends[0]
        self.stop_token_ids = tuple(
            sorted(
                {
                    *(token_id for _, token_id in self.capabilities.turn_ends),
                    *stop_token_ids,
                    *_ids(tokenizer.eos_token_id),
                }
            )
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        template_options: Mapping[str, Any] | None = None,
        parser: str | None = None,
    ) -> Self:
        """The renderer of a model folder; see `__init__`.

        Raises ValueError with the folder and what it lacks.
        """
        # Imported here because it loads torch, which `agentrl show` and a launch do not need.
        with importing():
            from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"model folder {folder} holds no usable tokenizer: {error}") from None
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"model folder {folder} has no fast tokenizer (tokenizer.json)")
        if not tokenizer.chat_template:
            raise ValueError(
                f"model folder {folder} has no chat template: put a chat_template.jinja into it"
            )
        stop_token_ids: tuple[int, ...] = ()
        if (Path(folder) / "generation_config.json").exists():
            stop_token_ids = _ids(GenerationConfig.from_pretrained(str(folder)).eos_token_id)
        try:
            return cls(tokenizer, stop_token_ids, template_options, parser)
        except ValueError as error:
            raise ValueError(f"model folder {folder} cannot be used for turns: {error}") from None

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> list[int]:
        """The token ids of a prompt for the next assistant turn."""
        return list(self.prompt(messages, tools).ids)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None
    ) -> RenderedPrompt:
        """A rendered prompt. It is cached: the rollouts of a task share it."""
        return self._prompts(orjson.dumps(list(messages)), orjson.dumps(list(tools or ())))

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The rendered text of escaped messages, with the next assistant header if wanted.

        Raises `TemplateRefusal` if the template rejects them.
        """
        try:
            return self._apply(
                self.capabilities.adapt_messages(messages, tools),
                self.capabilities.adapt_tools(tools),
                add_generation_prompt,
            )
        except TemplateRefusal as refusal:
            raise TemplateRefusal(f"the chat template refuses the messages: {refusal}") from None

    def read_turn(
        self, text: str, prompted: str = "", tools: Sequence[ToolSchema] | None = None
    ) -> TurnReading:
        """Parse a turn's text. `prompted`: the part of the turn that the prompt wrote."""
        marks = self.capabilities.thought_marks
        return read_turn(
            text, prompted, marks, self.parse_calls, tools or (), self.capabilities.frame
        )

    def said(self, content: str) -> str:
        """The text of an answer without control tokens, headers and frame.

        `content`: the turn's text outside its calls. A thought between control tokens is removed;
        a thought between other marks (`<think>`) stays.
        """
        marks, codec = self.capabilities.thought_marks, self.codec
        if codec.specials(marks.open + marks.close):
            content = content[find_thought(content, marks)[1] :]
        return codec.without_specials(self.capabilities.frame.peel_content(content)).strip()

    def begins_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt has begun the thought of the turn that follows it."""
        end = self.codec.decode(prompt_ids[-_END_OF_PROMPT:])
        return end.rstrip().endswith(self.capabilities.thought_marks.open)

    def split_turn(self, output_ids: Sequence[int]) -> tuple[str, int | None]:
        """The text of a generated turn without its stop token, and the stop token's id or None."""
        stop = output_ids[-1] if output_ids[-1] in self.stop_token_ids else None
        return self.codec.decode(output_ids if stop is None else output_ids[:-1]), stop

    def call_id(self, name: str, index: int) -> str:
        """The id for call number `index` of a conversation, if the model wrote none."""
        return f"functions.{name}:{index}" if self.capabilities.named_by_id else f"call{index:05}"

    def escape_message(self, message: Message) -> Message:
        """The message with control tokens in text from outside escaped."""
        role = message["role"]
        if role == "assistant":
            return message
        special_only = role != "tool"
        content = self.codec.escape_values(message["content"], special_only=special_only)
        return {**message, "content": content}

    def encode_inside(self, escaped: str) -> list[int]:
        """The token ids of escaped text within a sequence."""
        return self.codec.encode(escaped, start=False)

    def encode(self, escaped: str) -> list[int]:
        """The token ids of escaped text at the start of a sequence."""
        return self.codec.encode(escaped)

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        except TemplateError as error:
            raise TemplateRefusal(str(error)) from error
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error
        assert isinstance(text, str)
        return text

    def _render_prompt(self, messages_json: bytes, tools_json: bytes) -> RenderedPrompt:
        escaped = tuple(map(self.escape_message, orjson.loads(messages_json)))
        tools = self.codec.escape_values(orjson.loads(tools_json)) or None
        text = self.render_text(escaped, tools)
        return RenderedPrompt(text, tuple(self.encode(text)), escaped, tools)


def _ids(token_ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """A configuration value with no, one or several token ids, as a tuple."""
    if token_ids is None:
        return ()
    return (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
