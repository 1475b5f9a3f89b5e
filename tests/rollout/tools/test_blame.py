"""Which task is to blame for a server that goes away: no clock, no I/O."""

from agentrl.rollout.tools.blame import BLAMED_AFTER, SUSPECTED_AFTER, Blame


def test_a_server_that_goes_away_once_makes_nobody_a_suspect() -> None:
    blame = Blame()
    for task in ("a", "b", "c"):
        blame.cut_off(task, sent=1, now=2, alone=False)
        blame.cut_off(task, sent=1.5, now=3, alone=False)  # another call, the same time
    assert not any(blame.is_suspect(task) for task in "abc")


def test_who_was_under_way_twice_is_a_suspect_until_an_attempt_ends_well() -> None:
    blame = Blame()
    for now in range(SUSPECTED_AFTER):
        assert not blame.is_suspect("a")
        blame.cut_off("a", sent=now + 0.5, now=now + 1, alone=False)
    assert blame.is_suspect("a")
    blame.ended_well("a")
    assert not blame.is_suspect("a")


def test_who_is_cut_off_alone_while_others_are_answered_between_is_to_blame() -> None:
    blame = Blame()
    for now in range(BLAMED_AFTER):
        assert not blame.is_to_blame("a")
        blame.cut_off("a", sent=now + 0.5, now=now + 1, alone=True)
        blame.answered("a", sent=now + 1.2)  # its other calls say nothing
        assert blame.lets_others_first("a") is (now == 0)
        blame.answered("b", sent=now + 1.3)
        assert not blame.lets_others_first("a")
    assert blame.is_to_blame("a")
    blame.ended_well("a")  # another of its rollouts
    assert blame.is_to_blame("a")


def test_a_server_that_answers_nobody_blames_nobody() -> None:
    blame = Blame()
    for now in range(100):
        for task in ("a", "b", "c"):
            blame.cut_off(task, sent=now + 0.5, now=now + 1, alone=True)
            blame.answered("d", sent=0.7)  # asked before it began to fail
    assert all(blame.is_suspect(task) and not blame.is_to_blame(task) for task in "abc")


def test_who_is_never_alone_is_not_to_blame() -> None:
    blame = Blame()
    for now in range(100):
        blame.cut_off("a", sent=now + 0.5, now=now + 1, alone=False)
        blame.answered("b", sent=now + 1.3)
    assert not blame.is_to_blame("a")
