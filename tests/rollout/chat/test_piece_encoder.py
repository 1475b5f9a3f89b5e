"""A prompt in pieces, of which those that were encoded before are not encoded again."""

import random
import re

import pytest
from conversations import SPACES, WORDS
from families import FAMILIES, Family, renderer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.rollout.chat.escaping import EscapingCodec, longest_of
from agentrl.rollout.chat.piece_encoder import PieceEncoder

each_family = pytest.mark.parametrize("family", FAMILIES, ids=str)
few = settings(
    max_examples=settings.default.max_examples // 5,
    suppress_health_check=[HealthCheck.differing_executors],
)


def make_text(source: random.Random, codec: EscapingCodec) -> str:
    """Text of a prompt: words, space, control tokens, and control tokens that are escaped."""
    tokens = codec.special_texts or ("x",)
    words = [*WORDS, *SPACES, *tokens, *tokens, *map(codec.escape_tool_text, tokens)]
    return "".join(source.choices(words, k=source.randint(0, 12)))


@each_family
@few
@given(source=st.randoms(use_true_random=False))
def test_the_ids_of_the_pieces_are_those_of_the_text(family: Family, source: random.Random) -> None:
    codec = renderer_of(family.name).codec
    encoder = PieceEncoder(codec)
    for _ in range(3):  # prompts that share pieces
        for start in (True, False):
            text = make_text(source, codec)
            for again in (text, make_text(source, codec) + text):
                assert encoder.encode(again, start=start) == codec.encode(again, start=start)
                end = renderer_of(family.name).turn_end_id
                assert encoder.encode(again, end) == codec.encode(again, end)
        encoder.end_prompt()


@given(
    st.sets(st.text("<|ab>", min_size=1, max_size=6), max_size=12), st.text("<|ab>", max_size=30)
)
def test_the_longest_added_token_at_a_place_is_escaped(tokens: set[str], text: str) -> None:
    longest_first = sorted(tokens, key=len, reverse=True)
    expected = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    found = [(match.start(), match[0]) for match in longest_of(list(tokens)).finditer(text)]
    assert found == [(match.start(), match[0]) for match in expected.finditer(text)]


def test_what_the_prompt_before_had_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = renderer_of("qwen3").codec
    encoder = PieceEncoder(codec)
    turns = [f"<|im_start|>user\n{word}<|im_end|>\n" for word in ("one", "two three", "12")]
    encoder.encode("".join(turns))
    encoder.end_prompt()
    encoded: list[str] = []
    encode = codec.encode
    monkeypatch.setattr(
        codec, "encode", lambda text, **rest: (encoded.append(text), encode(text, **rest))[1]
    )
    changed = "<|im_start|>user\nx<|im_end|>\n"
    assert encoder.encode(turns[0] + changed + turns[2]) == encode(turns[0] + changed + turns[2])
    assert encoded == ["<|im_start|>user\nx"]
