"""Answer schemas."""

import re

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


@given(st.lists(st.sampled_from(["\\boxed{", "\\fbox {", "{", "}", "\\", "\\}", "a", " "])))
def test_a_box_ends_at_the_first_brace_that_closes_it(words: list[str]) -> None:
    text = "".join(words)
    expected = None
    for box in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        depth, place = 1, box.end()
        while place < len(text) and depth:
            if text[place] == "\\":
                place += 1
            else:
                depth += {"{": 1, "}": -1}.get(text[place], 0)
            place += 1
        expected = expected if depth else text[box.end() : place - 1].strip()
    assert extract_answer(text, "boxed") == expected


def test_a_text_full_of_boxes_is_read_once() -> None:
    # For each box again, this would be read for hours.
    assert extract_answer("\\boxed{" * 100_000, "boxed") is None
    assert extract_answer("\\boxed{" * 100_000 + "7}", "boxed") == "7"


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
