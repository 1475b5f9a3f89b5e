"""Which requests of a session are repetitions, and which answer a repetition gets.

Clients repeat a request whose answer got lost: with a header that says so, or just again. Equal
requests may also be many on purpose, as votes are, so that each answer is for one client:

    an answer that nobody has got, and nobody waits for     the next equal request, header or not
    one that a client waits for, as far as is known         one with the header
    one that has arrived, as far as is known                one with the header; the latest
"""

from dataclasses import dataclass, field

from agentrl.databases.documents import DispatchedSamplingTask, ProgramRequest
from agentrl.gateway.answering import Answering
from agentrl.rollout.agents.llm import ChatReply

StoredAnswer = ChatReply | DispatchedSamplingTask


@dataclass(eq=False, slots=True)
class Asked:
    """A request and its answers.

    `number`: of the request in its session. `stored`: answers by choice that an earlier process has
    stored. `answering`: None until this process begins to answer. `arrived`: whether the one who
    asked last has got the answer, as it seems. `n_given`: how many have asked. `n_waiting`: how
    many of them wait.
    """

    number: int
    stored: dict[int, StoredAnswer] = field(default_factory=dict)
    answering: Answering | None = None
    arrived: bool = False
    n_given: int = 0
    n_waiting: int = 0

    @property
    def failed(self) -> bool:
        """Whether there will be no answer."""
        return self.answering is not None and self.answering.failed

    @property
    def is_lost(self) -> bool:
        """Whether nobody has the answer, and nobody waits for it."""
        return not self.arrived and self.n_waiting == 0


class Repetitions:
    """The requests of a session, by digest: equal for equal requests."""

    def __init__(self) -> None:
        self.n_asked = 0
        self._asked: dict[str, dict[int, Asked]] = {}  # by digest, and then by number

    def restore(self, request: ProgramRequest, answer: StoredAnswer) -> None:
        """Know a request, and one of its answers, that an earlier process has stored."""
        equal = self._asked.setdefault(request.digest, {})
        asked = equal.setdefault(request.number, Asked(request.number, arrived=True))
        asked.stored[request.choice] = answer
        asked.arrived = asked.arrived and request.delivered
        self.n_asked = max(self.n_asked, request.number + 1)

    def find(self, digest: str, *, repeated: bool) -> Asked:
        """The request that a client repeats, or a new one. `repeated`: it says that it asked."""
        equal = self._asked.setdefault(digest, {})
        for number in [number for number, asked in equal.items() if asked.failed]:
            del equal[number]
        known = [equal[number] for number in sorted(equal)]
        asked = next((asked for asked in known if asked.is_lost), None)
        if asked is None and repeated and known:
            waited_for = [asked for asked in known if asked.n_waiting]
            asked = min(waited_for or reversed(known), key=lambda asked: asked.n_given)
        if asked is None:
            asked = equal[self.n_asked] = Asked(self.n_asked)
            self.n_asked += 1
        return asked


@dataclass(frozen=True, slots=True)
class Given:
    """A client's part in a request: it waits until `over`. `answering`: what it is answered."""

    asked: Asked
    answering: Answering
    place: int

    @classmethod
    def of(cls, asked: Asked, answering: Answering) -> "Given":
        """The part of a client that asks now."""
        asked.n_given += 1
        asked.n_waiting += 1
        return cls(asked, answering, asked.n_given)

    def over(self, *, whole: bool) -> None:
        """The client waits no longer. `whole`: the answer has left for it, as it seems."""
        self.asked.n_waiting -= 1
        if self.place == self.asked.n_given:  # of earlier ones, it is the repetition that counts
            self.asked.arrived = whole
