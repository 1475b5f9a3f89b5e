"""Scorers: exact match, mathematics in its own process, and registered ones."""

import re
import threading
from pathlib import Path

import pytest
from scoring import make_record, make_task

from agentrl.configs import ConfigError, parse_config
from agentrl.databases.documents import Record, Task
from agentrl.databases.records import RecordLedger
from agentrl.rollout.scorers import Score, Scorers, known_scorers, register_scorer
from agentrl.rollout.scorers.compared_texts import contains, exact_match, f1
from agentrl.rollout.scorers.mcp_factory import MCPScorerFactory


async def score(scorers: Scorers, name: str, answer: str, truth: str | None) -> float | None:
    record = await scorers.score(make_task(name, answer=truth), make_record(answer))
    return record.score


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("Paris", "paris ", 1.0), ("a  b\n", "A b", 1.0), ("42.", "42", 0.0), ("", "42", 0.0),
        ("Ang\u0065\u0301", "ang\u00e9", 1.0), ("\u1100\u1161", "\uac00", 1.0),
        ("\u0130stanbul", "i\u0307stanbul", 1.0), ("\u00b2", "2", 0.0), ("e", "\u00e9", 0.0),
    ],
)  # fmt: skip
async def test_exact_match_ignores_case_white_space_and_the_form_of_unicode(
    scorers: Scorers, answer: str, truth: str, expected: float
) -> None:
    assert await score(scorers, "exact_match", answer, truth) == expected


async def test_a_registered_scorer_is_called_by_its_parameter_names(
    scorers: Scorers,
) -> None:
    async def length(ground_truth: str, model_answer: str) -> float:
        return float(len(model_answer) - len(ground_truth))

    MCPScorerFactory.register_scorer("length", length)
    assert "length" in known_scorers()
    assert await score(scorers, "length", "abc", "a") == 2.0


async def test_a_scorer_that_raises_or_returns_no_number_is_an_error_and_never_a_score(
    scorers: Scorers,
) -> None:
    async def broken(model_answer: str, ground_truth: str) -> float:
        raise LookupError("the grader is gone")

    async def vague(model_answer: str, ground_truth: str) -> float:
        return float("nan")

    MCPScorerFactory.register_scorer("broken", broken)
    MCPScorerFactory.register_scorer("vague", vague)
    with pytest.raises(LookupError, match="the grader is gone"):
        await score(scorers, "broken", "a", "b")
    with pytest.raises(ValueError, match="'vague' returned nan"):
        await score(scorers, "vague", "a", "b")


def test_a_function_that_cannot_be_a_scorer_is_refused() -> None:
    async def other(answer: str) -> float:
        return 1.0

    def blind(question: str, ground_truth: str) -> float:
        return 1.0

    def mixed(model_answer: str, records: list[Record]) -> list[float]:
        return []

    with pytest.raises(ValueError, match="'other' takes `answer`; a scorer takes, by name, of"):
        register_scorer("other", other)
    with pytest.raises(ValueError, match="'blind' takes nothing of the Record"):
        register_scorer("blind", blind)
    with pytest.raises(ValueError, match="'mixed' takes `model_answer`"):
        register_scorer("mixed", mixed)
    with pytest.raises(ValueError, match="no function"):
        register_scorer("number", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'largest' is .*whose parameters cannot be seen"):
        register_scorer("largest", max)
    with pytest.raises(ValueError, match="'math' is built in"):
        register_scorer("math", exact_match)
    with pytest.raises(ValueError, match="without `\\*`, `\\+` and white space"):
        register_scorer("a+b", exact_match)


async def test_an_unknown_scorer_is_refused_with_the_known_names(scorers: Scorers) -> None:
    with pytest.raises(ValueError, match=r"unknown scorer 'bleu'; known: agentcpm, .*math"):
        await score(scorers, "bleu", "a", "b")


async def test_a_task_without_an_answer_is_an_error_of_the_task(scorers: Scorers) -> None:
    with pytest.raises(ValueError, match="no `answer`"):
        await score(scorers, "exact_match", "a", None)


@pytest.mark.parametrize(
    ("answer", "truth", "contained", "overlap"),
    [
        ("It is Paris.", "paris", 1.0, 0.5),  # 1 shared word of 3 and 1
        ("The Eiffel Tower", "eiffel tower", 1.0, 1.0),  # articles do not count
        ("42", "4", 0.0, 0.0),  # words are compared whole
        ("-3", "3", 0.0, 0.0),
        ("12,000 people", "12000", 1.0, 2 / 3),
        ("1.5", "15", 0.0, 0.0),
        ("blue and green", "green blue", 0.0, 0.8),  # not in one piece; 2 of 3 and 2
        ("to be or not to be", "to be", 1.0, 0.5),  # each word as often as it stands there
        ("\u5317\u4eac\u5e02", "\u5317\u4eac", 1.0, 0.8),  # no spaces: each sign is a word
        ("", "x", 0.0, 0.0),
        ("?", "?", 1.0, 1.0),  # no words at all
    ],
)
def test_texts_are_compared_by_their_words(
    answer: str, truth: str, contained: float, overlap: float
) -> None:
    assert contains(answer, truth) == contained
    assert f1(answer, truth) == pytest.approx(overlap)


async def test_a_weighted_sum_scores_each_part_and_keeps_them(scorers: Scorers) -> None:
    task = make_task("0.5*exact_match + 0.25*f1 + contains", answer="the red bin")
    record = await scorers.score(task, make_record("red bin, I think"))
    # f1: red and bin of 4 words and 2
    assert record.scores == {"exact_match": 0.0, "f1": pytest.approx(2 / 3), "contains": 1.0}
    assert record.score == pytest.approx(0.25 * 2 / 3 + 1.0)


async def test_a_scorer_takes_by_name_what_it_needs_and_may_be_a_plain_function(
    scorers: Scorers,
) -> None:
    def few_turns(record: Record, task: Task) -> Score:
        assert threading.current_thread() is not threading.main_thread()
        return Score(1 / record.n_turns, f"{record.n_turns} turns on {task.query}")

    register_scorer("few_turns", few_turns)
    record = await scorers.score(make_task("few_turns", answer=None), make_record(None, n_turns=4))
    assert (record.score, record.explanations) == (0.25, {"few_turns": "4 turns on ?"})


async def test_a_scorer_that_scores_nothing_leaves_the_whole_sum_without_a_score(
    scorers: Scorers,
) -> None:
    async def undecided(model_answer: str) -> None:
        return None

    register_scorer("undecided", undecided)
    record = await scorers.score(make_task("exact_match+0.1*undecided"), make_record("42"))
    assert (record.score, record.scores) == (None, {"exact_match": 1.0, "undecided": None})


async def test_a_scorer_of_the_whole_group_sees_all_that_the_others_scored(
    scorers: Scorers,
) -> None:
    async def longest(records: list[Record], ground_truth: str) -> list[float | None]:
        longest = max(len(record.final_answer or "") for record in records)
        return [float(len(record.final_answer or "") == longest) for record in records]

    def even(model_answer: str) -> float | None:
        return None if len(model_answer) % 2 else 1.0

    register_scorer("longest", longest)
    register_scorer("even", even)
    task = make_task("even + longest")
    records = [
        await scorers.score(task, make_record(answer, rollout=rollout))
        for rollout, answer in enumerate(["42", "4242", "42424"])
    ]
    assert [record.score for record in records] == [None, None, None]  # the group's is to come
    said = await scorers.score_group(task, records)
    assert [(of.record[-5:], of.scorer, of.score) for of in said] == [
        ("t0-a0", "longest", 0.0),
        ("t1-a0", "longest", 1.0),
    ]


async def test_a_scorer_of_the_whole_group_has_to_score_every_record_of_it(
    scorers: Scorers,
) -> None:
    def short(records: list[Record]) -> list[float]:
        return [1.0]

    register_scorer("short", short)
    with pytest.raises(ValueError, match="not a list with a score for each of the 2 Records"):
        await scorers.score_group(make_task("short"), [make_record(), make_record(rollout=1)])


async def test_scorers_of_a_file_are_registered_once(tmp_path: Path, records: RecordLedger) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from agentrl import register_scorer\n"
        "register_scorer('shouts', lambda model_answer: float(model_answer.isupper()))\n"
    )
    config = parse_config(["--scorer_module", str(file)])
    async with Scorers.of_run(config, records) as scorers, Scorers.of_run(config, records):
        assert await score(scorers, "shouts", "YES", None) == 1.0
    with pytest.raises(ConfigError, match=r"--scorer_module .*none\.py: there is no such"):
        Scorers.of_run(parse_config(["--scorer_module", str(tmp_path / "none.py")]), records)


async def test_an_installed_package_brings_scorers_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scorers: Scorers
) -> None:
    (tmp_path / "vowel_scorer.py").write_text(
        "def vowels(model_answer):\n    return float(sum(c in 'aeiou' for c in model_answer))\n"
    )
    metadata = tmp_path / "vowel_scorer-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: vowel-scorer\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[agentrl.scorers]\nvowels = vowel_scorer:vowels\nlost = vowel_scorer:lost\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert {"vowels", "lost"} <= known_scorers()
    assert await score(scorers, "vowels", "queue", None) == 4.0
    with pytest.raises(ConfigError, match="entry point vowel_scorer:lost cannot be used"):
        await score(scorers, "lost", "queue", None)


async def test_the_scorers_of_the_documentation_work(tmp_path: Path, records: RecordLedger) -> None:
    guide = Path(__file__).parents[3] / "docs" / "reference" / "rewards.md"
    fence = r'^```python title="scorers.py"\n(.*?)^```$'
    (code,) = re.findall(fence, guide.read_text(), re.M | re.S)
    file = tmp_path / "scorers.py"
    file.write_text(code)
    async with Scorers.of_run(parse_config(["--scorer_module", str(file)]), records) as scorers:
        record = await scorers.score(make_task("brief", answer="4"), make_record("4"))
        assert record.score == pytest.approx(1 / 1.01)
        assert record.explanations == {"brief": "1 characters"}
        group = [make_record(n_tool_calls=3), make_record(rollout=1, n_tool_calls=1)]
        said = await scorers.score_group(make_task("fewest_calls"), group)
        assert [of.score for of in said] == [0.0, 1.0]
