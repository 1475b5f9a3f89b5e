"""The demo model's tokenizer: a byte-level BPE of some 400 tokens, and the conversations it reads.

Digits and capitals are tokens of their own, so that names and numbers are copied one by one. What
opens, joins and closes a tool call is one token each: the choice of the next step is then a
choice of one token, and a record is short. `demonstrations.py` says what is said, this file how
it is spelt; the chat template is `chat_template.jinja` beside it.
"""

import json
from pathlib import Path
from typing import Any

from demonstrations import Demonstration, Turn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")

TOOL_PARAMETERS = {
    "find": {"item": "string"},
    "stock": {"bin": "string"},
    "add": {"a": "integer", "b": "integer"},
    "sub": {"a": "integer", "b": "integer"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": type_} for key, type_ in parameters.items()},
                "required": list(parameters),
            },
        },
    }
    for name, parameters in TOOL_PARAMETERS.items()
]

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, START, END]
# As in Qwen3 these are single tokens but not special ones: they are decoded and parsed as text.
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
MARKERS += ["<answer>", "</answer>", "<tool_response>\n", "\n</tool_response>"]
CALL_OPENINGS = [
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"{next(iter(parameters))}": '
    + ('"' if "string" in parameters.values() else "")
    for name, parameters in TOOL_PARAMETERS.items()
]
CALL_PARTS = [*CALL_OPENINGS, ', "b": ', '"}}\n</tool_call>', "}}\n</tool_call>"]
# One digit, one capital, a word, a newline, a run of signs, a space.
WORD_PATTERN = r"\d|[A-Z]| ?[a-z]+|\n| ?[^\sA-Za-z\d]+|\s"


def build_tokenizer(
    demonstrations: list[Demonstration], vocab_size: int
) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges (up to `vocab_size` tokens, added ones apart) fit these texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    untrained = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        (_without_added_tokens(render(untrained, one)) for one in demonstrations), trainer
    )
    backend.add_tokens(MARKERS + CALL_PARTS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=CHAT_TEMPLATE,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def messages_of(demonstration: Demonstration) -> list[dict[str, Any]]:
    """The demonstration as chat messages."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": demonstration.question}]
    for turn in demonstration.turns:
        calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in turn.calls
        ]
        messages.append({"role": "assistant", "content": turn.text, "tool_calls": calls})
        messages += [{"role": "tool", "content": result} for result in turn.results]
    return messages


def render(tokenizer: PreTrainedTokenizerFast, demonstration: Demonstration) -> str:
    """The demonstration as the chat template spells it."""
    text = tokenizer.apply_chat_template(messages_of(demonstration), tools=[*TOOLS], tokenize=False)
    assert isinstance(text, str)
    return text


def tokenise(
    tokenizer: PreTrainedTokenizerFast, demonstration: Demonstration
) -> tuple[list[int], list[int]]:
    """Token ids, and a mask of equal length that is 1 on what the assistant says, its end included.

    Built piece by piece, as a sampler builds a conversation: prompt, generated turn, delta, …
    """
    prompt = tokenizer.apply_chat_template(
        messages_of(demonstration)[:1], tools=[*TOOLS], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(prompt, str)
    pieces = [(prompt, 0)]
    for turn in demonstration.turns:
        pieces.append((assistant_text(turn) + END, 1))
        if turn.results:
            pieces.append((tool_results_delta(turn.results), 0))
    token_ids: list[int] = []
    loss_mask: list[int] = []
    for text, is_generated in pieces:
        ids = tokenizer.encode(text, add_special_tokens=False)
        token_ids += ids
        loss_mask += [is_generated] * len(ids)
    return token_ids, loss_mask


def assistant_text(turn: Turn) -> str:
    """What the assistant generates in a turn, without the token that ends it."""
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": '
        f"{json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>"
        for name, arguments in turn.calls
    ]
    return "\n".join(([turn.text] if turn.text else []) + calls)


def tool_results_delta(results: tuple[str, ...]) -> str:
    """What the chat template adds between an assistant's calls and its next turn."""
    responses = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in results)
    return f"\n{START}user{responses}{END}\n{START}assistant\n"


def _without_added_tokens(text: str) -> str:
    # Added tokens are cut out of a text before BPE sees it; longest first, as they match.
    for token in sorted(SPECIAL_TOKENS + MARKERS + CALL_PARTS, key=len, reverse=True):
        text = text.replace(token, "\n")
    return text
