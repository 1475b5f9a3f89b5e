"""A run whose parts are hosts of their own, joined by nothing but URLs; one is cut off for a while.

`fleet.py` is the run; that every document of it is right in the end is said by the verifier of
`tests/chaos`.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import MAX_STALENESS, ROWS_PER_STEP, Fleet
from network import Network
from run import read_state
from verify import violations


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    # its Unix socket needs a shorter path than pytest's folders have
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, Network() as network:
        fleet = Fleet(network, Path(folder), samplers=2, services=1, lease_s=2.0)
        try:
            yield fleet
        finally:
            fleet.end()


def owners_at_work(fleet: Fleet) -> set[str]:
    """The samplers that hold slots."""
    with fleet.database() as documents:
        tasks = documents["tasks"].find({"slots.status": "leased"}, {"slots": 1})
        return {s["owner"] for task in tasks for s in task["slots"] if s["status"] == "leased"}


@pytest.mark.timeout(300)
def test_a_sampler_that_is_cut_off_loses_its_slots_to_another_and_works_again_when_joined(
    fleet: Fleet,
) -> None:
    fleet.start()
    fleet.wait(lambda: len(owners_at_work(fleet)) == 2, 90, "both samplers at work")
    away = fleet.members["sampler-0"]
    name = f"-{away.pid}-"  # a sampler's name in the ledger holds its process id

    def holds_slots() -> bool:
        return any(name in owner for owner in owners_at_work(fleet))

    fleet.wait(holds_slots, 30, "the sampler holds slots")
    away.host.cut()
    fleet.wait(lambda: not holds_slots(), 30, "its slots are taken from it")
    step = fleet.steps()
    fleet.wait(lambda: fleet.steps() >= step + 2, 60, "the run goes on without it")
    assert not holds_slots()
    away.host.join()
    fleet.wait(holds_slots, 60, "the sampler holds slots again")
    assert away.deaths == 0  # the same process all the time
    fleet.finish(120)
    state = read_state(fleet)
    assert violations(state, MAX_STALENESS, ROWS_PER_STEP) == []
    assert any("went silent" in (record["error"] or "") for record in state.records)
