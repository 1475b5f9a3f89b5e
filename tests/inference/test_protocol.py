"""The values of the protocol."""

import doctest

import pytest

from agentrl.inference import protocol
from agentrl.inference.protocol import Generation
from agentrl.policy_version import VersionSpan


def test_the_worked_example_of_a_generation_is_true() -> None:
    outcome = doctest.testmod(protocol)
    assert outcome.attempted > 0 and outcome.failed == 0


@pytest.mark.parametrize(
    ("logprobs", "spans", "complaint"),
    [
        ((-1.0,), [VersionSpan(0, 0, 2)], "2 tokens with 1 logprobs"),
        ((-1.0, -2.0), [VersionSpan(0, 0, 1)], "do not cover 2 tokens"),
    ],
)
def test_a_token_without_its_logprob_or_version_makes_no_generation(
    logprobs: tuple[float, ...], spans: list[VersionSpan], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Generation((5, 6), logprobs, "stop", tuple(spans), 3, 0, 0.1, "http://a")
