"""What rank 0 finds out reaches the others, its failure too; nobody waits for one that is gone."""

from pathlib import Path

import agreeing


def test_what_rank_0_finds_out_is_what_all_have(tmp_path: Path) -> None:
    assert agreeing.in_two(agreeing.asks_main, tmp_path) == [{"fence": 3}, {"fence": 3}]


def test_what_fails_on_rank_0_fails_on_all(tmp_path: Path) -> None:
    assert agreeing.in_two(agreeing.main_fails, tmp_path) == [
        ("ValueError", "the run is taken"),
        ("FailedElsewhere", "process 0 has failed: the run is taken"),
    ]


def test_what_fails_on_one_process_is_said_there_and_ends_all(tmp_path: Path) -> None:
    assert agreeing.in_two(agreeing.second_fails, tmp_path) == [
        ("FailedElsewhere", "process 1 has failed: no such folder here"),
        ("ValueError", "no such folder here"),
    ]


def test_a_stop_of_one_process_is_known_to_all(tmp_path: Path) -> None:
    assert agreeing.in_two(agreeing.second_stops, tmp_path) == [[True, False], [True, False]]


def test_a_process_that_dies_is_missed_at_once(tmp_path: Path) -> None:
    (kind, message), nothing = agreeing.in_two(agreeing.second_dies, tmp_path)  # type: ignore[misc]
    assert (kind, nothing) == ("ProcessLost", None)
    assert message.startswith("another process of the trainer has ended")
