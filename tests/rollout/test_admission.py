"""The staleness bound, by its formulas and with several samplers that see different moments."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from agentrl.rollout.scheduling.admission import admission_limit, admitted_groups, room

small = st.integers(0, 6)
sizes = st.integers(1, 8)


@given(max_staleness=small, version=small, batch=sizes, made=st.integers(0, 200), running=small)
def test_the_bound_on_all_rows_is_the_bound_on_rows_that_are_not_trained_yet(
    max_staleness: int, version: int, batch: int, made: int, running: int
) -> None:
    accepted = version * batch + made
    by_all = room(
        max_staleness=max_staleness, version=version, batch=batch, accepted=accepted,
        running=running,
    )  # fmt: skip
    by_waiting = room(
        max_staleness=max_staleness, version=0, batch=batch, accepted=made, running=running
    )
    assert by_all == by_waiting


@given(max_staleness=small, batch=sizes, group_size=sizes, accepted=small, running=small)
def test_groups_are_admitted_one_by_one_while_the_bound_holds(
    max_staleness: int, batch: int, group_size: int, accepted: int, running: int
) -> None:
    n = admitted_groups(
        room(
            max_staleness=max_staleness, version=0, batch=batch, accepted=accepted, running=running
        ),
        group_size,
    )
    begun, bound = 0, (max_staleness + 1) * batch
    while accepted + running + begun * group_size < bound:
        begun += 1
    assert n == begun


def test_without_staleness_one_batch_is_admitted_and_the_next_when_it_is_trained() -> None:
    def groups(accepted: int) -> int:
        free = room(max_staleness=0, version=0, batch=8, accepted=accepted, running=0)
        return admitted_groups(free, group_size=4)

    assert [groups(accepted) for accepted in (0, 4, 7, 8, 12)] == [2, 1, 1, 0, 0]


def test_the_admission_limit_is_the_place_of_the_last_admitted_group() -> None:
    places = [3, 4, 1_000_000_000, 1_000_000_001]
    assert admission_limit(places, room=5, group_size=2) == 1_000_000_000
    assert admission_limit(places, room=1, group_size=2) == 3
    assert admission_limit(places, room=100, group_size=2) == 1_000_000_001
    assert admission_limit(places, room=0, group_size=2) is None
    assert admission_limit(places, room=-4, group_size=2) is None
    assert admission_limit([], room=9, group_size=2) is None


@dataclass
class Sampler:
    """One sampler's look at the ledger: three readings, with anything between any two of them."""

    not_begun: list[int] = field(default_factory=list)
    running: int = 0
    readings: int = 0
    admission_limit: int | None = None


class SeveralSamplers(RuleBasedStateMachine):
    """Samplers look, begin, end and train in any order; each acts on what it saw long ago."""

    @initialize(
        max_staleness=st.integers(0, 3), batch=st.integers(1, 6), group_size=st.integers(1, 5),
        samplers=st.integers(2, 4),
    )  # fmt: skip
    def begin(self, max_staleness: int, batch: int, group_size: int, samplers: int) -> None:
        self.max_staleness, self.batch, self.group_size = max_staleness, batch, group_size
        self.samplers = [Sampler() for _ in range(samplers)]
        self.not_begun = list(range(400))
        self.open: list[int] = []
        self.rows: list[int] = []  # made and not trained: the group of each
        self.bound = (max_staleness + 1) * batch

    @rule(who=st.integers(0, 3))
    def read(self, who: int) -> None:
        """The next reading of a sampler's look; after the third it knows its admission_limit."""
        sampler = self.samplers[who % len(self.samplers)]
        if sampler.readings == 0:
            sampler.not_begun = list(self.not_begun[: self.bound])
        elif sampler.readings == 1:
            sampler.running = len(self.open) * self.group_size
        else:
            free = room(
                max_staleness=self.max_staleness, version=0, batch=self.batch,
                accepted=len(self.rows), running=sampler.running,
            )  # fmt: skip
            sampler.admission_limit = admission_limit(sampler.not_begun, free, self.group_size)
        sampler.readings = (sampler.readings + 1) % 3

    @rule(who=st.integers(0, 3))
    def claim(self, who: int) -> None:
        """Begin the oldest group, if it is within the sampler's own admission_limit."""
        mine = self.samplers[who % len(self.samplers)].admission_limit
        if mine is not None and self.not_begun and self.not_begun[0] <= mine:
            self.open.append(self.not_begun.pop(0))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50), data=st.data())
    def finalise(self, which: int, data: st.DataObject) -> None:
        """A group ends: some of its rows are accepted, the rest left out."""
        group = self.open.pop(which % len(self.open))
        self.rows += [group] * data.draw(st.integers(0, self.group_size))

    @precondition(lambda self: len(self.rows) >= self.batch)
    @rule()
    def train(self) -> None:
        self.rows = sorted(self.rows)[self.batch :]

    @invariant()
    def the_bound_holds_but_for_the_rest_of_one_group(self) -> None:
        if hasattr(self, "rows"):
            taken = len(self.rows) + len(self.open) * self.group_size
            assert taken < self.bound + self.group_size

    @invariant()
    def there_is_always_a_way_on(self) -> None:
        """With nothing open and no full batch, a sampler that looks anew may begin a group."""
        if hasattr(self, "rows") and not self.open and len(self.rows) < self.batch:
            free = room(
                max_staleness=self.max_staleness, version=0, batch=self.batch,
                accepted=len(self.rows), running=0,
            )  # fmt: skip
            assert admission_limit(self.not_begun, free, self.group_size) is not None


SeveralSamplers.TestCase.settings = settings(
    max_examples=settings.default.max_examples * 3 // 5, stateful_step_count=60, deadline=None
)
TestSeveralSamplers = SeveralSamplers.TestCase
