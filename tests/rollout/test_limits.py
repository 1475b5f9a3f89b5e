"""The limits of a record, at and around each of them."""

import pytest

from agentrl.configs import SamplingConfig
from agentrl.databases.documents import StopReason
from agentrl.rollout.agents.limits import LimitReached, Limits, TurnLimit

LIMITS = Limits(max_turns=3, max_tokens=100, max_prompt_tokens=60, max_new_tokens=20)


def test_the_longest_prompt_is_as_long_as_the_record_unless_its_flag_says_otherwise() -> None:
    flags = SamplingConfig(max_turns=3, max_tokens=100, max_new_tokens=20)
    assert Limits.of(flags).max_prompt_tokens == 100
    flags = SamplingConfig(max_turns=3, max_tokens=100, max_new_tokens=20, max_prompt_tokens=60)
    assert Limits.of(flags) == LIMITS


def test_prompts_may_be_longer_than_what_is_trained_of_them() -> None:
    flags = SamplingConfig(max_turns=3, max_tokens=100, max_new_tokens=20, max_prompt_tokens=150)
    assert Limits.of(flags) == Limits(3, 170, 150, 20)


@pytest.mark.parametrize(
    ("n_turns", "prompt_len", "reason"),
    [
        (2, 60, None),
        (3, 100, StopReason.MAX_TURNS),
        (2, 100, StopReason.MAX_TOKENS),
        (2, 61, StopReason.MAX_PROMPT_TOKENS),
    ],
)
def test_a_record_ends_at_the_first_limit_that_it_has_reached(
    n_turns: int, prompt_len: int, reason: StopReason | None
) -> None:
    assert LIMITS.reached(n_turns, prompt_len) is reason
    if reason is None:
        assert LIMITS.room(n_turns, prompt_len) == 40
    else:
        with pytest.raises(LimitReached) as raised:
            LIMITS.room(n_turns, prompt_len)
        assert raised.value.stop_reason is reason


def test_a_turn_is_cut_off_by_what_is_smaller_and_says_by_which() -> None:
    assert LIMITS.of_turn(20) == TurnLimit(20, StopReason.MAX_NEW_TOKENS)
    assert LIMITS.of_turn(19) == TurnLimit(19, StopReason.MAX_TOKENS)
    assert LIMITS.of_turn(19, 5) == TurnLimit(5, StopReason.MAX_NEW_TOKENS)
    assert LIMITS.of_turn(50, 500) == TurnLimit(20, StopReason.MAX_NEW_TOKENS)
