"""Conversations as tokens: the chat template applied turn by turn.

    rendered prompt | generated ids, verbatim | delta | generated ids | delta | ...

A delta is what the template writes after a generated turn: the separator, tool results, the next
assistant header. It is read off the template itself, by rendering a probe conversation, and not
written down here for a model family. After every turn the text so far is compared with the template
applied to the whole conversation; where they differ (a template that rewrites earlier turns, a turn
that ended in an unusual token) the conversation goes on in a new segment, rendered as a whole.

Text that comes from tools can never become one of the tokenizer's added tokens (`<|im_end|>`,
`<tool_call>`), and that of users none of its special ones: such strings are *guarded* between two
Unicode noncharacters from before rendering until encoding, which spells them out as plain text.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import orjson
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

Message = dict[str, str]  # role and content
ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {...}}, as OpenAI writes it

_GUARD_OPEN, _GUARD_CLOSE = "\ufdd0", "\ufdd1"
_GUARDED = re.compile(f"{_GUARD_OPEN}([^{_GUARD_CLOSE}]*){_GUARD_CLOSE}")
_PROBE_QUESTION, _PROBE_TURN = "probe-question", "probe-turn"
_CACHED_PROMPTS = 512


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a conversation goes on after a turn.

    `extends`: `ids` are appended to the tokens so far; otherwise they are the whole prompt of a new
    segment.
    """

    ids: list[int]
    extends: bool


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A rendered prompt: its guarded text, its tokens, and the tools as the template gets them."""

    text: str
    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None


class ChatRenderer:
    """A tokenizer with its chat template, for many conversations at once.

    Raises ValueError if the template cannot be extended turn by turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stop_token_ids: Sequence[int] = ()
    ) -> None:
        """`stop_token_ids`: tokens that end a turn, beside the tokenizer's and the template's."""
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        # Own copies: transformers switches a tokenizer's settings at every call.
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        self._codec = _bare_codec(backend, backend["added_tokens"])
        self._plain = _bare_codec(backend, [])
        added = [token for token in backend["added_tokens"] if not token["content"].isspace()]
        self._added = _any_of([token["content"] for token in added])
        self._special = _any_of([token["content"] for token in added if token["special"]])
        for token in added:
            if token["id"] in self._plain.encode(token["content"], add_special_tokens=False).ids:
                raise ValueError(
                    f"the tokenizer makes its token {token['content']!r} of plain text too, so "
                    "tools could write it"
                )
        self._delta_pieces = lru_cache(maxsize=64)(self._probe_delta)
        self._prompts = lru_cache(maxsize=_CACHED_PROMPTS)(self._render_prompt)
        self.turn_end, self.turn_end_id = self._find_turn_end()
        self.stop_token_ids = tuple(
            sorted({self.turn_end_id, *stop_token_ids, *_ids(tokenizer.eos_token_id)})
        )
        self._check_extension()

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The renderer of a model folder. Raises ValueError naming the folder and what it lacks."""
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
            return cls(tokenizer, stop_token_ids)
        except ValueError as error:
            raise ValueError(f"model folder {folder} cannot be used for turns: {error}") from None

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> list[int]:
        """The tokens of a conversation that an assistant turn is to continue."""
        return list(self.prompt(messages, tools).ids)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> _Prompt:
        """A rendered prompt; the attempts at one task share it."""
        return self._prompts(orjson.dumps(list(messages)), orjson.dumps(list(tools or ())))

    def render_delta(self, results: Sequence[str]) -> list[int]:
        """What follows a turn that the model ended itself: tool results and the next header."""
        return self.encode(self.delta_text([self.guard_tool_text(text) for text in results]))

    def delta_text(self, guarded_results: Sequence[str]) -> str:
        """`render_delta` as guarded text."""
        pieces = self._delta_pieces(len(guarded_results))
        parts = [pieces[0]]
        for result, piece in zip(guarded_results, pieces[1:], strict=True):
            parts += (result, piece)
        return "".join(parts)

    def read_turn(self, output_ids: Sequence[int]) -> tuple[str, bool]:
        """A generated turn as text, and whether it ended with the template's own end of turn.

        A stop token at its end is no part of the text.
        """
        ended = output_ids[-1] == self.turn_end_id
        stopped = ended or output_ids[-1] in self.stop_token_ids
        ids = output_ids[:-1] if stopped else output_ids
        return _unguarded(self._codec.decode(list(ids), skip_special_tokens=False)), ended

    def guard_tool_text(self, text: str) -> str:
        """Text from a tool, with every string that is an added token guarded."""
        return _guard(text, self._added)

    def render_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """The template applied to guarded messages, up to the next assistant header."""
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert isinstance(text, str)
        return text

    def encode(self, guarded: str) -> list[int]:
        """The tokens of guarded text."""
        if _GUARD_OPEN not in guarded:
            ids: list[int] = self._codec.encode(guarded, add_special_tokens=False).ids
            return ids
        ids = []
        for index, piece in enumerate(_GUARDED.split(guarded)):
            codec = self._plain if index % 2 else self._codec
            ids += codec.encode(_unguarded(piece), add_special_tokens=False).ids
        return ids

    def _render_prompt(self, messages_json: bytes, tools_json: bytes) -> _Prompt:
        messages: list[Message] = orjson.loads(messages_json)
        guarded = tuple(
            {**message, "content": self._guard_message(message)} for message in messages
        )
        tools = [_guard_all(tool, self._added) for tool in orjson.loads(tools_json)] or None
        text = self.render_text(guarded, tools)
        return _Prompt(text, tuple(self.encode(text)), guarded, tools)

    def _guard_message(self, message: Message) -> str:
        if message["role"] == "assistant":
            return _unguarded(message["content"])
        pattern = self._added if message["role"] == "tool" else self._special
        return _guard(message["content"], pattern)

    def _probe_delta(self, n_results: int) -> tuple[str, ...]:
        """The template's text around `n_results` tool results, from after the end of turn on."""
        holes = [f"probe-result-{index}-end" for index in range(n_results)]
        rest = self._after_probe_turn(holes)[len(self.turn_end) :]
        pieces = []
        for hole in holes:
            piece, found, rest = rest.partition(hole)
            if not found:
                raise ValueError("the chat template does not write tool results as they are")
            pieces.append(piece)
        return (*pieces, rest)

    def _after_probe_turn(self, results: Sequence[str]) -> str:
        messages = [
            {"role": "user", "content": _PROBE_QUESTION},
            {"role": "assistant", "content": _PROBE_TURN},
            *({"role": "tool", "content": result} for result in results),
        ]
        _, found, rest = self.render_text(messages, None).partition(_PROBE_TURN)
        if not found:
            raise ValueError("the chat template does not write an assistant turn as it is")
        return rest

    def _find_turn_end(self) -> tuple[str, int]:
        """The special token with which the template ends an assistant turn."""
        rest = self._after_probe_turn(["probe-result"])
        ids = self._codec.encode(rest, add_special_tokens=False).ids
        text = self._codec.id_to_token(ids[0])
        if text is None or not self._special.fullmatch(text) or not rest.startswith(text):
            raise ValueError(
                "the chat template does not end an assistant turn with a special token, but with "
                f"{rest[:20]!r}"
            )
        return text, ids[0]

    def _check_extension(self) -> None:
        """Two turns with tools, rendered turn by turn and as a whole, must be the same tokens."""
        question = [{"role": "user", "content": _PROBE_QUESTION}]
        conversation = Conversation(self, question, None)
        ids = list(conversation.prompt_ids)
        messages = list(question)
        for results in (["one"], ["two", "three"]):
            turn = self.encode(_PROBE_TURN + self.turn_end)
            continuation = conversation.extend(turn, results)
            messages.append({"role": "assistant", "content": _PROBE_TURN})
            messages += [{"role": "tool", "content": result} for result in results]
            ids += turn + continuation.ids
            if not continuation.extends or ids != self.encode(self.render_text(messages, None)):
                raise ValueError(
                    "the chat template rewrites earlier turns when tool results are added, so a "
                    "conversation cannot grow by appending tokens"
                )


class Conversation:
    """One record's messages, and the text that the tokens of its current segment stand for."""

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
    ) -> None:
        prompt = renderer.prompt(messages, tools)
        self.prompt_ids: Sequence[int] = prompt.ids
        self.n_drifts = 0
        self._renderer = renderer
        self._messages = list(prompt.messages)
        self._tools = prompt.tools
        self._text = prompt.text

    def extend(self, output_ids: Sequence[int], results: Sequence[str]) -> Continuation:
        """Add a generated turn and what its tools answered."""
        renderer = self._renderer
        content, ended = renderer.read_turn(output_ids)
        guarded = [renderer.guard_tool_text(text) for text in results]
        delta = renderer.delta_text(guarded)
        self._messages.append({"role": "assistant", "content": content})
        self._messages += [{"role": "tool", "content": text} for text in guarded]
        whole = renderer.render_text(self._messages, self._tools)
        extended = self._text + content + renderer.turn_end + delta
        self._text = whole
        if ended and extended == whole:
            return Continuation(renderer.encode(delta), extends=True)
        self.n_drifts += 1
        log.warning(
            "a turn %s; the conversation goes on in a new segment",
            "is rewritten by the chat template" if ended else "has no end of turn",
        )
        return Continuation(renderer.encode(whole), extends=False)


def _bare_codec(backend: dict[str, Any], added_tokens: list[dict[str, Any]]) -> Tokenizer:
    """A tokenizer as `backend` describes it, that adds nothing and cuts nothing off."""
    bare = {"post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps({**backend, **bare, "added_tokens": added_tokens}))


def _any_of(strings: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _unguarded(text: str) -> str:
    return text.replace(_GUARD_OPEN, "").replace(_GUARD_CLOSE, "")


def _guard(text: str, pattern: re.Pattern[str]) -> str:
    # A guard that stands in the text already is dropped: it could end one of ours.
    return pattern.sub(rf"{_GUARD_OPEN}\g<0>{_GUARD_CLOSE}", _unguarded(text))


def _guard_all(value: Any, pattern: re.Pattern[str]) -> Any:
    """A JSON value with all its strings guarded, names of fields included."""
    if isinstance(value, str):
        return _guard(value, pattern)
    if isinstance(value, dict):
        return {_guard(key, pattern): _guard_all(item, pattern) for key, item in value.items()}
    if isinstance(value, list):
        return [_guard_all(item, pattern) for item in value]
    return value


def _ids(token_ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids as configuration files write them: none, one or several."""
    if token_ids is None:
        return ()
    return (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
