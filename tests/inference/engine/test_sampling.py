"""Logits to tokens: the distribution that is drawn from, and the logprobs that are told."""

import pytest
import torch

from agentrl.inference.engine.sampling import TokenSampling, edit_logits, sample, seeded_uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def draw(sampling: TokenSampling, times: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, logprobs = sample(LOGITS.expand(times, -1), [sampling] * times, [], generator)
    return torch.tensor(tokens), torch.tensor(logprobs)


def test_tokens_are_drawn_with_the_probabilities_of_the_tempered_logits() -> None:
    tokens, logprobs = draw(TokenSampling(temperature=0.7), 40_000)
    expected = (LOGITS / 0.7).softmax(-1)
    assert torch.allclose(tokens.bincount(minlength=5) / len(tokens), expected, atol=0.01)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (TokenSampling(top_k=2), {0, 1}),
        (TokenSampling(top_p=0.6), {0}),
        (TokenSampling(top_p=0.7), {0, 1}),
        (TokenSampling(min_p=0.2), {0, 1}),
        (TokenSampling(top_k=3, min_p=0.2), {0, 1}),
        (TokenSampling(temperature=0.0).checked(), {0}),
        (TokenSampling(top_k=1).checked(), {0}),
    ],
)
def test_filters_limit_what_is_drawn_but_not_the_logprobs(
    sampling: TokenSampling, allowed: set[int]
) -> None:
    tokens, logprobs = draw(sampling, 2_000)
    assert set(tokens.tolist()) == allowed
    assert torch.allclose(logprobs, LOGITS.log_softmax(-1)[tokens], atol=1e-6)


def test_a_row_s_filter_does_not_touch_the_other_rows() -> None:
    rows = 2_000
    samplings = [TokenSampling(), TokenSampling(top_k=1).checked(), TokenSampling(top_k=2)]
    generator = torch.Generator().manual_seed(0)
    tokens, _ = sample(LOGITS.expand(3 * rows, -1), samplings * rows, [], generator)
    by_row = torch.tensor(tokens).view(rows, 3)
    assert [len(by_row[:, i].unique()) for i in range(3)] == [4, 1, 2]


def test_the_ends_of_the_uniform_range_give_ids_that_can_be_drawn() -> None:
    logits = torch.tensor([[-1e9, 0.0, 0.0, -1e9]] * 2)
    tokens, _ = sample(
        logits, [TokenSampling()] * 2, [(0, 0.0), (1, 1.0 - 2**-53)], torch.Generator()
    )
    assert tokens == [2, 1]


def test_a_seed_fixes_a_row_whatever_else_is_drawn() -> None:
    seeded = TokenSampling(seed=7)
    numbers = [seeded_uniform(7, position) for position in range(50)]
    assert len(set(numbers)) == 50
    alone = [
        sample(LOGITS[None], [seeded], [(0, u)], torch.Generator().manual_seed(i))[0][0]
        for i, u in enumerate(numbers)
    ]
    crowd = [
        sample(LOGITS.expand(3, -1), [seeded] * 3, [(1, u)], torch.Generator())[0][1]
        for u in numbers
    ]
    assert alone == crowd and len(set(alone)) > 1


def test_penalties_change_the_logits_of_tokens_seen_before() -> None:
    logits = LOGITS.clone()
    edit_logits(logits, TokenSampling(repetition_penalty=2.0), [0], [3], [])
    assert logits.tolist() == [1.0, 1.0, 0.0, -2.0, -30.0]
    logits = LOGITS.clone()
    edit_logits(
        logits, TokenSampling(presence_penalty=0.5, frequency_penalty=0.25), [0], [1, 1, 2], []
    )
    assert logits.tolist() == [2.0, 0.0, -0.75, -1.0, -30.0]
    logits = LOGITS.clone()
    edit_logits(logits, TokenSampling(min_new_tokens=2), [0], [1], [2])
    assert logits[2] == float("-inf")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": 0},
        {"min_p": 1.5},
        {"presence_penalty": 3.0},
        {"temperature": float("nan")},
        {"temperature": 1e300},
        {"repetition_penalty": 1e-320},
        {"min_new_tokens": -1},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TokenSampling(**wrong).checked()


def test_the_widest_values_that_are_taken_leave_a_token_to_draw() -> None:
    wide = TokenSampling(
        temperature=1e4, top_k=2**64 - 1, repetition_penalty=0.01, presence_penalty=-2.0,
        frequency_penalty=-2.0, min_new_tokens=5,
    ).checked()  # fmt: skip
    logits = torch.full((8,), 500.0)
    edit_logits(logits, wide, [0, 1], [2, 2], range(1, 8))
    tokens, logprobs = sample(logits[None], [wide], [], torch.Generator())
    assert tokens == [0] and logprobs == [0.0]


def test_logits_that_are_no_numbers_are_named() -> None:
    logits = torch.tensor([[0.0, float("nan")]])
    with pytest.raises(ValueError, match="logits are no numbers"):
        sample(logits, [TokenSampling()], [], torch.Generator())
