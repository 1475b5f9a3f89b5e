"""When a sampler looks and claims again: no change that it is told of is forgotten."""

import pytest

from agentrl.databases.documents import Run
from agentrl.databases.runs import RunHopeless
from agentrl.rollout.scheduling.claim_state import ClaimState, Work
from agentrl.rollout.scheduling.work_view import WorkView


def looked(view: WorkView | None = None) -> ClaimState:
    state = ClaimState()
    state.looking()
    state.seen(view or WorkView())
    return state


def test_a_claim_in_vain_is_not_made_again_until_something_changes_or_an_attempt_opens_it() -> None:
    state = looked()
    state.trying()
    assert state.work is Work.NONE
    state.opened()
    assert state.work is Work.POSSIBLE
    state.trying()
    state.found()
    assert state.work is Work.POSSIBLE and state.take_found() and not state.take_found()
    state.trying()
    state.changed()
    assert state.work is Work.UNKNOWN


@pytest.mark.parametrize("then", ["trying", "opened", "found", "seen"])
def test_what_changes_during_a_look_or_a_claim_leads_to_another_look(then: str) -> None:
    state = ClaimState()
    assert state.work is Work.UNKNOWN, "nobody has looked yet"
    state.looking()
    state.changed()
    state.seen(WorkView()) if then == "seen" else getattr(state, then)()
    assert state.work is Work.UNKNOWN


def test_an_admission_limit_is_worth_a_claim_if_it_is_another_and_forgotten_with_its_trainer() -> (
    None
):
    run = Run(id="run", fence=1)
    state = looked(WorkView(training=run))
    assert not state.admitted(None) and state.admitted(7) and not state.admitted(7)
    assert state.seen(WorkView(training=run)) is None and state.admission_limit == 7
    assert state.seen(WorkView()) is None and state.admission_limit == 7
    resumed = Run(id="run", fence=2)
    assert state.seen(WorkView(training=resumed)) is resumed and state.admission_limit is None


def test_a_run_that_was_given_up_ends_who_saw_it_otherwise_and_no_one_else() -> None:
    given_up = WorkView(hopeless="it gets nowhere")
    late = looked(given_up)
    assert late.seen(given_up) is None
    late.seen(WorkView())
    with pytest.raises(RunHopeless, match="gets nowhere"):
        late.seen(given_up)
