"""Which faults befall a run, when, and for how long: drawn from a seed before it begins."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done to a member of the fleet."""

    KILL = "kill -9"  # its process; started again after the fault's time
    STOP = "SIGSTOP"  # its process stands still, then goes on
    CUT = "network cut"  # its host reaches nobody, then everybody again
    STEP_DOWN = "step-down"  # of the primary of the replica set
    ERROR = "error 500"  # is all that the judge answers
    NONSENSE = "NaN"  # is all that the judge answers
    SHORT_CONTEXT = "short context"  # of a service, which comes back with less than was asked for


@dataclass(frozen=True)
class Fault:
    """`kind` befalls `target` after `at_s` seconds, for `lasts_s` seconds."""

    at_s: float
    lasts_s: float
    kind: Kind
    target: str

    @property
    def title(self) -> str:
        """What the results count it as: the kind and the target's role."""
        return f"{self.kind} {role(self.target)}"

    @property
    def ends_s(self) -> float:
        """When it is over."""
        return self.at_s + self.lasts_s


# The faults that there are, and how many leases or seconds they last. `mongod` is the one of the
# three that is the primary at that time.
_LEASES = {Kind.STOP: 2.0, Kind.CUT: 2.0}
_LASTS_S = {Kind.STEP_DOWN: (1.0, 1.0), Kind.ERROR: (2.0, 6.0), Kind.NONSENSE: (1.0, 3.0),
            Kind.SHORT_CONTEXT: (8.0, 12.0)}  # fmt: skip
_DOWN_S = {
    "sampler": (0.5, 3.0), "trainer": (0.5, 3.0), "service": (0.5, 3.0), "mongod": (1.0, 6.0),
    "tools": (2.0, 8.0),
}  # fmt: skip
_FAULTS = [
    *((Kind.KILL, role) for role in ("sampler", "trainer", "service", "mongod", "tools")),
    *((Kind.STOP, role) for role in ("sampler", "trainer", "service")),
    *((Kind.CUT, role) for role in ("sampler", "trainer", "service", "mongod")),
    (Kind.STEP_DOWN, "mongod"),
    *((kind, "judge") for kind in (Kind.ERROR, Kind.NONSENSE)),
    (Kind.SHORT_CONTEXT, "service"),
]
REQUIRED = [
    *((Kind.KILL, role) for role in ("sampler", "trainer", "service", "mongod", "tools")),
    (Kind.STOP, "sampler"),
    (Kind.CUT, "sampler"),
    (Kind.STEP_DOWN, "mongod"),
    (Kind.ERROR, "judge"),
    (Kind.NONSENSE, "judge"),
    (Kind.SHORT_CONTEXT, "service"),
]


def role(member: str) -> str:
    """`sampler` of `sampler-1`."""
    return member.rpartition("-")[0] or member


def draw_faults(
    seed: int, count: int, seconds: float, members: Sequence[str], lease_s: float
) -> list[Fault]:
    """`count` faults in order of time, one in each of `count` equal parts of `seconds`.

    All of `REQUIRED` are among them if `count` allows it. A member that a fault befalls gets no
    other one until `lease_s` seconds after it: it is to come back before the next.
    """
    rng = random.Random(seed)
    wanted = rng.sample(REQUIRED, min(count, len(REQUIRED)))
    while len(wanted) < count:
        wanted.append(rng.choice(_FAULTS))
    rng.shuffle(wanted)
    faults: list[Fault] = []
    free_at = dict.fromkeys(members, 0.0)
    for number in range(count):
        at = (number + rng.random()) * seconds / count
        # the first of the faults still wanted that finds somebody it may befall
        for choice in wanted:
            kind, who = choice
            targets = [m for m in members if role(m) == who and free_at[m] <= at]
            if targets:
                break
        else:
            kind, who = choice = wanted[0]
            target = min((m for m in members if role(m) == who), key=lambda m: free_at[m])
            targets, at = [target], free_at[target]
        wanted.remove(choice)
        target = rng.choice(targets)
        if kind in _LEASES:
            lasts = _LEASES[kind] * lease_s
        else:
            lasts = rng.uniform(*(_LASTS_S.get(kind) or _DOWN_S[who]))
        fault = Fault(at, lasts, kind, target)
        free_at[target] = fault.ends_s + lease_s
        faults.append(fault)
    return sorted(faults, key=lambda fault: fault.at_s)
