"""Sampler processes and a sharded cluster, simulated event by event; no database runs.

A part of `scaling.py`, which says what is simulated and why.
"""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Then = Callable[[], None]
Costs = dict[str, dict[str, float]]  # microseconds of each operation: by command, by document


@dataclass(frozen=True)
class Load:
    """The load of the samplers. By default a record takes a minute."""

    samplers: int = 10_000
    records_each: int = 16  # at once, in one sampler
    group: int = 8
    turns: int = 4
    turn_median_s: float = 9.0  # generating and tools; lognormal
    turn_sigma: float = 1.0
    lease_s: float = 60.0
    rows_waiting: int = 20_000  # rows that the trainer has not trained yet

    @property
    def turn_mean_s(self) -> float:
        return self.turn_median_s * math.exp(self.turn_sigma**2 / 2)

    @property
    def records_per_s(self) -> float:
        """Records per second with a database without delay."""
        return self.samplers * self.records_each / (self.turns * self.turn_mean_s)

    @property
    def open_groups(self) -> int:
        return self.samplers * self.records_each // self.group


@dataclass(frozen=True)
class Cluster:
    """The servers. `tasks` and the small collections are on a separate primary."""

    shards: int = 4  # for records, turns and rows
    cores: int = 16  # of each primary
    round_trip_s: float = 0.001  # sampler, router, server and back
    majority_s: float = 0.003  # what a write waits for the secondaries
    conflicting: float = 0.5  # the part of a claim's time in which another one's commit disturbs it


@dataclass(frozen=True)
class Design:
    """A design: how samplers learn the admission limit, who reaps, and where claims conflict."""

    name: str
    streams: bool = True  # every sampler has a change stream open; else it polls one document
    counts: bool = True  # before a claim, groups and rows are counted; else one document is read
    all_reap: bool = True  # every sampler, every third of a lease; else one of them
    lanes: int = 1  # groups that claims are spread over


POLL_S = 1.0  # where the run's document is polled for


@dataclass
class Server:
    """A primary: `cores` operations at once, the others in a queue."""

    name: str
    cores: int
    busy: int = 0
    busy_s: float = 0.0  # of all cores, up to `counted`
    counted: float = 0.0
    queue: deque[tuple[float, Then, Then]] = field(default_factory=deque)


@dataclass
class Sampler:
    """One sampler process."""

    working: int = 0
    claiming: bool = False
    in_flight: set[str] = field(default_factory=set)
    waiting: dict[str, list[Then]] = field(default_factory=dict)


class Simulation:
    """One design under one load."""

    def __init__(self, design: Design, load: Load, cluster: Cluster, costs: Costs) -> None:
        self.design, self.load, self.cluster = design, load, cluster
        self._costs = costs
        self._rng = random.Random(0)
        self._now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._order = itertools.count()
        self.ledger = Server("tasks", cluster.cores)
        self.shards = [Server(f"shard {n}", cluster.cores) for n in range(cluster.shards)]
        self.operations: Counter[str] = Counter()
        self.documents: Counter[str] = Counter()
        self.claim_s: list[float] = []
        self.conflicts = 0
        self.finished = 0
        self._claimed = [0] * design.lanes  # a group changes with every claim of it

    def run(self, seconds: float) -> dict[str, Any]:
        """Simulate `seconds`. Returns the figures of the second half; the first is warm-up."""
        load = self.load
        for number in range(load.samplers):
            sampler = Sampler(working=load.records_each)
            for _ in range(load.records_each):  # somewhere in the middle of their records
                turn = self._rng.randrange(load.turns)
                self._at(self._turn_left_s(), self._turn, sampler, turn)
            third = load.lease_s / 3
            self._at(self._rng.random() * third, self._keep_leases, sampler, number == 0)
            if not self.design.streams:
                self._at(self._rng.random() * POLL_S, self._poll, sampler)
        self._until(seconds / 2)
        for counter in (self.operations, self.documents):
            counter.clear()
        self.claim_s, self.conflicts, self.finished = [], 0, 0
        for server in (self.ledger, *self.shards):
            self._count(server)
            server.busy_s = 0.0
        self._until(seconds)
        for server in (self.ledger, *self.shards):
            self._count(server)
        return self._figures(seconds / 2)

    def _figures(self, seconds: float) -> dict[str, Any]:
        shard = sum(server.busy_s for server in self.shards) / len(self.shards)
        waits = sorted(self.claim_s)
        return {
            "records_per_s": round(self.finished / seconds),
            "of_what_was_asked": round(self.finished / seconds / self.load.records_per_s, 2),
            "tasks_primary_cores": round(self.ledger.busy_s / seconds, 1),
            "shard_cores": round(shard / seconds, 1),
            "claim_ms": [
                round(1000 * waits[int(len(waits) * share)], 1) for share in (0.5, 0.99) if waits
            ],
            "conflicts_per_claim": round(self.conflicts / max(1, len(self.claim_s)), 2),
            "operations_per_s": {
                name: round(count / seconds) for name, count in self.operations.most_common()
            },
            "documents_per_s": {
                name: round(count / seconds) for name, count in self.documents.most_common()
            },
        }

    # Time

    def _at(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._order), lambda: what(*args)))

    def _until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self._now = end

    def _turn_s(self) -> float:
        return self._rng.lognormvariate(math.log(self.load.turn_median_s), self.load.turn_sigma)

    def _turn_left_s(self) -> float:
        """Remaining seconds of a turn at a random moment (length-biased)."""
        mu = math.log(self.load.turn_median_s) + self.load.turn_sigma**2
        return self._rng.random() * self._rng.lognormvariate(mu, self.load.turn_sigma)

    # Servers

    def _ask(
        self, server: Server, name: str, documents: int, then: Then, begun: Then = lambda: None
    ) -> None:
        """An operation: its turn on the server, and the way back."""
        cost = self._costs[name]
        self.operations[name] += 1
        self.documents[name] += documents
        service_s = (cost.get("command", 0.0) + documents * cost.get("document", 0.0)) / 1e6
        writes = "read" not in name and "count" not in name
        if writes and self.design.streams:
            watched_us = self.load.samplers * self._costs["change stream"]["document"]
            service_s += documents * watched_us / 1e6
        reply_s = self.cluster.round_trip_s + self.cluster.majority_s * writes
        self._serve(server, service_s, lambda: self._at(reply_s, then), begun)

    def _serve(self, server: Server, service_s: float, done: Then, begun: Then) -> None:
        if server.busy == server.cores:
            server.queue.append((service_s, done, begun))
            return
        self._count(server)
        server.busy += 1
        begun()
        self._at(service_s, self._served, server, done)

    def _served(self, server: Server, done: Then) -> None:
        self._count(server)
        server.busy -= 1
        done()
        if server.queue and server.busy < server.cores:
            self._serve(server, *server.queue.popleft())

    def _count(self, server: Server) -> None:
        server.busy_s += server.busy * (self._now - server.counted)
        server.counted = self._now

    def _commit(self, sampler: Sampler, name: str, then: Then) -> None:
        """A write of one document through the sampler's group commit."""
        sampler.waiting.setdefault(name, []).append(then)
        if name not in sampler.in_flight:
            self._send(sampler, name)

    def _send(self, sampler: Sampler, name: str) -> None:
        """One bulk write, which the router splits by shard."""
        group = sampler.waiting.pop(name)
        sampler.in_flight.add(name)
        parts = Counter(self._rng.randrange(len(self.shards)) for _ in group)
        left = len(parts)

        def part_done() -> None:
            nonlocal left
            left -= 1
            if left:
                return
            sampler.in_flight.remove(name)
            for then in group:
                then()
            if name in sampler.waiting and name not in sampler.in_flight:
                self._send(sampler, name)

        for shard, documents in parts.items():
            self._ask(self.shards[shard], name, documents, part_done)

    # Samplers

    def _poll(self, sampler: Sampler) -> None:
        self._ask(self.ledger, "point read", 1, lambda: self._at(POLL_S, self._poll, sampler))

    def _look(self, then: Then) -> None:
        """Read the admission limit from one document, or by counting groups and rows."""
        if not self.design.counts:
            self._ask(self.ledger, "point read", 1, then)
            return

        def count_rows() -> None:
            left = len(self.shards)

            def counted() -> None:
                nonlocal left
                left -= 1
                if not left:
                    then()

            for shard in self.shards:
                rows = self.load.rows_waiting // len(self.shards)
                self._ask(shard, "count of rows", rows, counted)

        self._ask(self.ledger, "count of groups", self.load.open_groups, count_rows)

    def _claim(self, sampler: Sampler) -> None:
        """Fill the places that are free, one claim after the other."""
        if sampler.claiming or sampler.working == self.load.records_each:
            return
        sampler.claiming = True
        asked = self._now

        def claimed() -> None:
            self.claim_s.append(self._now - asked)
            sampler.claiming = False
            count = min(self.load.group, self.load.records_each - sampler.working)
            for _ in range(count):
                sampler.working += 1
                self._commit(sampler, "records insert", lambda: self._turns(sampler, 0))
            self._claim(sampler)

        self._look(lambda: self._try_claim(self._rng.randrange(self.design.lanes), claimed))

    def _try_claim(self, lane: int, claimed: Then) -> None:
        """A claim, repeated while other commits change the group."""
        cost_s = self._costs["claim"]["command"] / 1e6
        seen = 0

        def look() -> None:
            nonlocal seen
            seen = self._claimed[lane]

        def commit() -> None:
            if self._claimed[lane] != seen:
                self.conflicts += 1
                self._serve(self.ledger, self.cluster.conflicting * cost_s, commit, look)
                return
            self._claimed[lane] += 1
            self._at(self.cluster.round_trip_s + self.cluster.majority_s, claimed)

        def search() -> None:
            self._serve(self.ledger, self.cluster.conflicting * cost_s, commit, look)

        self.operations["claim"] += 1
        self.documents["claim"] += 1
        self._serve(self.ledger, (1 - self.cluster.conflicting) * cost_s, search, lambda: None)

    def _turns(self, sampler: Sampler, turn: int) -> None:
        self._at(self._turn_s(), self._turn, sampler, turn)

    def _turn(self, sampler: Sampler, turn: int) -> None:
        """Store a turn, then begin the next one or finish."""
        if turn + 1 < self.load.turns:
            self._commit(sampler, "turns insert", lambda: self._turns(sampler, turn + 1))
        else:
            self._commit(sampler, "turns insert", lambda: self._finish(sampler))

    def _finish(self, sampler: Sampler) -> None:
        """Store the Record as sampled, then with its score, and complete its slot."""

        def complete() -> None:
            self._ask(self.ledger, "complete", 1, lambda: self._completed(sampler))

        def score() -> None:
            self._commit(sampler, "records update", complete)

        self._commit(sampler, "records update", score)

    def _completed(self, sampler: Sampler) -> None:
        self.finished += 1
        sampler.working -= 1
        self._claim(sampler)
        if self._rng.random() < 1 / self.load.group:
            self._finalise(sampler)

    def _finalise(self, sampler: Sampler) -> None:
        """The last of its group: read the turns, write the rows, settle the Records."""
        steps: Iterator[str] = iter(("rows insert", "records update"))

        def next_step() -> None:
            name = next(steps, None)
            if name is None:
                self._ask(self.ledger, "finalised", 1, lambda: None)
                return
            self._together(sampler, name, next_step)

        turns = self.load.group * self.load.turns
        shard = self.shards[self._rng.randrange(len(self.shards))]
        self._ask(shard, "turns read", turns, next_step)

    def _together(self, sampler: Sampler, name: str, then: Then) -> None:
        """One write for each Record of a group, at once."""
        left = self.load.group

        def written() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        sampler.waiting.setdefault(name, []).extend([written] * self.load.group)
        if name not in sampler.in_flight:
            self._send(sampler, name)

    def _keep_leases(self, sampler: Sampler, reaps: bool) -> None:
        def again() -> None:
            self._at(self.load.lease_s / 3, self._keep_leases, sampler, reaps)

        def reap() -> None:
            if reaps or self.design.all_reap:
                self._ask(self.ledger, "reap", self.load.open_groups, again)
            else:
                again()

        self._ask(self.ledger, "heartbeat", sampler.working, reap)
