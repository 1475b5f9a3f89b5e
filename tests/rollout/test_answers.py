"""Answer schemas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.agents.answers import KNOWN_SCHEMAS, extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>42</answer>.", "42"),
        ("<answer>1</answer> no: <answer>\n 2 \n</answer>", "2"),
        ("<answer>first <answer>second</answer>", "second"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer></answer>", ""),
        ("the answer is 42", None),
        ("</answer><answer>", None),
        ("<answer>42", None),
    ],
)
def test_the_last_closed_answer_element_counts(text: str, answer: str | None) -> None:
    assert extract_answer(text, "answer") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{42}$", "42"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1}, or rather \fbox{ {2} }", "{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed {5}", "5"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{", None),
        (r"\boxed{\}", None),
        ("boxed{1}", None),
    ],
)
def test_the_last_closed_box_counts_with_nested_braces(text: str, answer: str | None) -> None:
    assert extract_answer(text, "boxed") == answer


def test_without_a_schema_the_whole_text_is_the_answer() -> None:
    assert extract_answer("  forty two \n", None) == "forty two"


def test_an_unknown_schema_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"unknown answer_schema 'xml'; known: answer, boxed"):
        extract_answer("42", "xml")


@given(st.text(alphabet=r"\{}boxedfbox <answer></answer>1", max_size=80))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for schema in KNOWN_SCHEMAS:
        answer = extract_answer(text, schema)
        assert answer is None or answer in text
