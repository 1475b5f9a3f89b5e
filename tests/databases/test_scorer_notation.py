"""How a task names its scorers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.databases.scorer_notation import parse_scorer, write_scorer


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("math", {"math": 1.0}),
        ("my-scorer.v2", {"my-scorer.v2": 1.0}),
        ("0.7*math+0.3*f1", {"math": 0.7, "f1": 0.3}),
        (" 2 * math + f1 + -0.1*length ", {"math": 2.0, "f1": 1.0, "length": -0.1}),
    ],
)
def test_a_scorer_is_a_name_or_a_weighted_sum(text: str, weights: dict[str, float]) -> None:
    assert parse_scorer(text) == weights


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "neither a name nor a weighted sum"),
        ("math+", "neither a name nor a weighted sum"),
        ("0.5*2*math", "neither a name nor a weighted sum"),
        ("two words", "neither a name nor a weighted sum"),
        ("math+0.5*math", "names 'math' twice"),
        ("much*math", "weight 'much' is not a number"),
        ("inf*math", "weight 'inf' is not finite"),
    ],
)
def test_what_is_no_sum_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_scorer(text)


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)


@given(st.dictionaries(names, st.floats(-5, 5).map(lambda w: round(w, 6)), min_size=1))
def test_weights_given_as_an_object_mean_the_same(weights: dict[str, float]) -> None:
    assert parse_scorer(write_scorer(weights)) == weights


@pytest.mark.parametrize("scorer", [3, None, {}, {"math": "half"}, {"math": True}, ["math"]])
def test_a_scorer_that_is_neither_text_nor_weights_is_refused(scorer: object) -> None:
    with pytest.raises(ValueError, match="`scorer`"):
        write_scorer(scorer)
