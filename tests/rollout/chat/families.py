"""The model families under test: template, control tokens, and how the model writes a turn.

The templates are the families' own, as they come with `trl`. Mistral's, Kimi K2's, MiniCPM's and
Qwen3-Coder's do not: those in `templates/` are written by us in the published form. The tokenizers
are trained here, with the families' control tokens: byte-level BPE, or BPE of characters with a
mark for spaces where the family has that. `write` puts a turn as the model does, independently of
the template: that the template writes it so too is what is tested.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import writers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from agentrl.rollout.chat import ChatRenderer, Message
from agentrl.rollout.tool_calls import ParsedCall

_TRL = find_spec("trl")
assert _TRL is not None and _TRL.origin is not None
TRL_TEMPLATES = Path(_TRL.origin).parent / "chat_templates"
OWN_TEMPLATES = Path(__file__).parent / "templates"

# Runs of line ends are one token, so that a boundary in the wrong place shows.
PIECES = r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "\n\n\n one\n\n two  three\n   \nassistant user tool system {}()\n",
    '{"name": "probe", "arguments": {"text": "one", "count": 12}}\n<parameter=text>\n',
] * 9


@dataclass(frozen=True)
class Said:
    """What a turn says."""

    thought: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()


def think(said: Said, opened: bool) -> str:
    """A thought as Qwen writes it. `opened`: the prompt has begun it."""
    if not said.thought and not opened:
        return ""
    return ("" if opened else "<think>\n") + f"{said.thought}\n</think>\n\n"


def chatml(calls: Callable[[Sequence[ParsedCall]], str], gap: str = "\n") -> Callable[..., str]:
    """Thought, content and calls one after the other. `gap`: between content and calls."""

    def write(said: Said, opened: bool) -> str:
        between = gap if said.content and said.calls else ""
        return think(said, opened) + said.content + between + calls(said.calls)

    return write


def write_llama(said: Said, opened: bool) -> str:
    return said.content + writers.llama3(said.calls)


def write_deepseek(said: Said, opened: bool) -> str:
    thought = f"{said.thought}\n</think>\n\n" if opened else ""
    calls = writers.deepseekv3(said.calls) if said.calls else ""
    return thought + said.content + calls


def write_glm(said: Said, opened: bool) -> str:
    text = f"\n<think>{said.thought}</think>" + (f"\n{said.content}" if said.content else "")
    return text + (f"\n{writers.glm45(said.calls)}" if said.calls else "")


def write_kimi(said: Said, opened: bool) -> str:
    return said.content + (writers.kimi_k2(said.calls) if said.calls else "")


def write_gpt_oss(said: Said, opened: bool) -> str:
    text = f"<|channel|>analysis<|message|>{said.thought}<|end|>" if said.thought else ""
    text += "<|start|>assistant" if said.thought else ""
    if not said.calls:
        return text + f"<|channel|>final<|message|>{said.content}"
    (call,) = said.calls
    arguments = writers.dumps(call.arguments)
    return text + f" to=functions.{call.name}<|channel|>commentary json<|message|>{arguments}"


def write_mistral(said: Said, opened: bool) -> str:
    return writers.mistral_array(said.calls) if said.calls else f" {said.content}"


def write_minicpm(said: Said, opened: bool) -> str:
    text = f"<|thought_start|>\n{said.thought}\n<|thought_end|>\n" if said.thought else ""
    if said.calls:
        text += writers.minicpm3(said.calls) + "\n"
    return text + said.content


def write_gemma4(said: Said, opened: bool) -> str:
    text = f"<|channel>thought\n{said.thought}\n<channel|>" if said.thought else ""
    ordered = [ParsedCall(call.name, dict(sorted(call.arguments.items()))) for call in said.calls]
    return text + said.content + writers.gemma4(ordered)


def write_cohere2(said: Said, opened: bool) -> str:
    return plain(said, opened) + "<|END_RESPONSE|>"


def plain(said: Said, opened: bool) -> str:
    return said.content + ("\n" if said.content and said.calls else "") + writers.qwen(said.calls)


@dataclass(frozen=True)
class Family:
    """A model family.

    special: control tokens; tags: added tokens that are no control tokens. thoughts: whether its
    turns hold thoughts; opened: the prompt begins them; calls: how many a turn may hold; mixed:
    whether content may stand beside calls. structured: the template writes thoughts and calls
    that it is given in fields.
    exact: after what a turn a conversation is always extended: "all", "tools" (results of tools,
    not a user's words), "tools without system" (and no system message), or "none".
    """

    name: str
    template: Path
    special: tuple[str, ...]
    write: Callable[[Said, bool], str]
    tags: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    stops: tuple[str, ...] = ("<|im_end|>",)
    options: dict[str, Any] = field(default_factory=dict)
    thoughts: bool = False
    opened: bool = False
    calls: int = 3
    mixed: bool = True
    spaces: str = "bytes"  # bytes | gemma | metaspace
    json_arguments: bool = False
    thought_in: str = "reasoning_content"
    structured: bool = True
    exact: str = "all"

    def __str__(self) -> str:
        return self.name

    def stop(self, said: Said, follow_up: str) -> str:
        """The token with which the model ends a turn."""
        if self.name.startswith("glm"):
            return "<|observation|>" if follow_up == "tool" else "<|user|>"
        if self.name in ("gemma4", "gemma4-v3", "gemma4-v4", "gemma4-v5"):
            return "<|tool_response>" if said.calls else "<turn|>"
        if self.name == "gpt-oss":
            return "<|call|>" if said.calls else "<|return|>"
        return self.stops[0]

    def message(self, said: Said, call_ids: Sequence[str]) -> Message:
        """The turn as a structured message."""
        message: Message = {"role": "assistant", "content": said.content}
        if said.thought:
            message[self.thought_in] = said.thought
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": writers.dumps(call.arguments)
                        if self.json_arguments
                        else call.arguments,
                    },
                }
                for call, call_id in zip(said.calls, call_ids, strict=True)
            ]
        return message


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
          "</think>")  # fmt: skip
_DEEPSEEK_TAGS = tuple(
    f"<｜{name}｜>"
    for name in (
        "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep",
        "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end",
        "User", "Assistant",
    )
)  # fmt: skip
_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
          "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")  # fmt: skip
_KIMI = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
         "<|im_middle|>")  # fmt: skip
_KIMI_TAGS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
              "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
        "<|observation|>")  # fmt: skip
_GLM_TAGS = (*_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
            "<|start|>", "<|end|>", "<|message|>", "<|call|>")  # fmt: skip
_MISTRAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
_MINICPM = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|tool_call_start|>",
            "<|tool_call_end|>", "<|thought_start|>", "<|thought_end|>")  # fmt: skip
_GEMMA4 = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|think|>", "<|channel>",
           "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
           "<tool_response|>", '<|"|>', "<|image|>", "<|audio|>", "<|video|>")  # fmt: skip
_COHERE = ("<PAD>", "<UNK>", "<EOS_TOKEN>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>",
           "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
           "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>",
           "<|START_ACTION|>", "<|END_ACTION|>")  # fmt: skip
_GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")


def _trl(name: str) -> Path:
    return TRL_TEMPLATES / f"{name}.jinja"


def _own(name: str) -> Path:
    return OWN_TEMPLATES / f"{name}.jinja"


_NO_THINK = {"enable_thinking": False}
_EOS = "<｜end▁of▁sentence｜>"
_CODER = chatml(writers.qwen3_coder, gap="\n\n")
FAMILIES = (
    Family("qwen2.5", _trl("qwen2_5"), _IM, chatml(writers.qwen)),
    Family("qwen3", _trl("qwen3"), _IM, chatml(writers.qwen), tags=_THINK, thoughts=True,
           exact="tools"),
    Family("qwen3-nothink", _trl("qwen3"), _IM, chatml(writers.qwen), tags=_THINK,
           options=_NO_THINK, exact="none"),
    Family("qwen3-2507", _trl("qwen3_instruct_2507"), _IM, chatml(writers.qwen)),
    Family("qwen3-coder", _own("qwen3_coder"), _IM, _CODER),
    Family("qwen3.5", _trl("qwen3_5_think"), _IM, _CODER, tags=_THINK, thoughts=True,
           opened=True, exact="tools"),
    Family("qwen3.5-nothink", _trl("qwen3_5_nothink"), _IM, _CODER, tags=_THINK,
           options=_NO_THINK, exact="tools"),
    Family("qwen3.6", _trl("qwen3_6"), _IM, _CODER, tags=_THINK, thoughts=True, opened=True,
           exact="tools"),
    Family("llama3.1", _trl("llama3_1"), _LLAMA, write_llama, tags=(), stops=("<|eot_id|>",),
           calls=1, mixed=False),
    Family("llama3.2", _trl("llama3_2"), _LLAMA, write_llama, tags=(), stops=("<|eot_id|>",),
           calls=1, mixed=False),
    Family("mistral", _own("mistral"), _MISTRAL, write_mistral, tags=(), stops=("</s>",),
           mixed=False, spaces="metaspace", exact="tools without system"),
    Family("deepseekv3", _trl("deepseekv3"), ("<｜begin▁of▁sentence｜>", _EOS), write_deepseek,
           tags=(*_DEEPSEEK_TAGS, "<think>", "</think>"), stops=(_EOS,), thoughts=True,
           opened=True, json_arguments=True, structured=False, exact="tools"),
    Family("glm4.5", _trl("glm4moe"), _GLM, write_glm, tags=_GLM_TAGS, stops=("<|user|>",),
           thoughts=True, exact="tools"),
    Family("kimi-k2", _own("kimi_k2"), _KIMI, write_kimi, tags=_KIMI_TAGS),
    Family("gpt-oss", _trl("gptoss"), _HARMONY, write_gpt_oss, tags=(), stops=("<|return|>",),
           thoughts=True, calls=1, mixed=False, thought_in="thinking", exact="tools"),
    Family("gemma3", _trl("gemma3"), _GEMMA, plain, tags=(), stops=("<end_of_turn>",),
           spaces="gemma", structured=False),
    Family("gemma2", _trl("gemma"), _GEMMA, plain, tags=(), stops=("<end_of_turn>",),
           spaces="gemma", structured=False),
    *(
        Family(name, _trl(template), _GEMMA4, write_gemma4, tags=(), stops=("<turn|>",),
               thoughts=True, spaces="gemma", mixed=False, exact="tools")
        for name, template in (("gemma4", "gemma4"), ("gemma4-v3", "gemma4_v3"),
                               ("gemma4-v4", "gemma4_v4"), ("gemma4-v5", "gemma4_v5"))
    ),
    # The revision of the release: results stand in turns of their own, thoughts nowhere.
    Family("gemma4-v2", _trl("gemma4_v2"), _GEMMA4, write_gemma4, tags=(), stops=("<turn|>",),
           thoughts=True, spaces="gemma", mixed=False, exact="none"),
    Family("cohere2", _trl("cohere2"), _COHERE, write_cohere2, tags=(),
           stops=("<|END_OF_TURN_TOKEN|>",), structured=False),
    Family("minicpm", _own("minicpm"), _MINICPM, write_minicpm, tags=(), thoughts=True),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer trained with the family's control tokens, with its template."""
    family = BY_NAME[name]
    tokenizer = Tokenizer(models.BPE(byte_fallback=family.spaces != "bytes"))
    alphabet: list[str] = []
    special = list(family.special)
    if family.spaces == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        if family.spaces == "gemma":
            tokenizer.normalizer = normalizers.Replace(" ", "▁")
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if family.spaces == "gemma":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(
            " ", "merged_with_previous"
        )  # its merges do not join lines
    if family.spaces != "bytes":
        tokenizer = _without_special_bytes(tokenizer, len(family.special))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in family.tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.stops[0], bos_token=_bos(family)
    )
    fast.chat_template = family.template.read_text(encoding="utf-8")
    return fast


def _bos(family: Family) -> str | None:
    starts = ("<|begin_of_text|>", "<s>", "<｜begin▁of▁sentence｜>", "<bos>", "<BOS_TOKEN>")
    return next((token for token in starts if token in family.special), None)


def _without_special_bytes(tokenizer: Tokenizer, n_special: int) -> Tokenizer:
    """The bytes' tokens are of the vocabulary, but no control tokens."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:n_special]
    return Tokenizer.from_str(json.dumps(state))


@cache
def renderer_of(name: str) -> ChatRenderer:
    """The renderer of a family's tokenizer and template."""
    family = BY_NAME[name]
    fast = tokenizer_of(name)
    stops = [fast.convert_tokens_to_ids(stop) for stop in family.stops]
    return ChatRenderer(fast, stops, family.options)
