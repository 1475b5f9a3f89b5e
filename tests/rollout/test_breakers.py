"""Which claims try what is out of reach, of a process with several breakers."""

import time

from agentrl.databases.documents import Split, Task
from agentrl.databases.feeder import make_tasks
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import Claim
from agentrl.failures import InfrastructureFailure, Need
from agentrl.rollout.scheduling.breaker import FIRST_PAUSE_S
from agentrl.rollout.scheduling.breakers import Breakers


class Unprobed(InfrastructureFailure):
    need = Need.AGENT


def task(agent: str, scorer: str) -> Task:
    line = TaskLine(id="a", query="?", agent_name=agent, scorer=scorer)
    (made,) = make_tasks([line], Split.TRAIN, 0, 1, [0])
    return made


def claim(agent: str, scorer: str, *, to_score: bool = False) -> Claim:
    return Claim(task(agent, scorer), 0, 0, 0, to_score=to_score)


async def test_a_claim_tries_only_what_it_needs_of_what_is_out_of_reach() -> None:
    breakers = Breakers(lambda name: frozenset({name}), lambda: None)
    for agent in ("searcher", "coder"):
        outage = Unprobed(f"{agent}'s index is out of reach", dependency=agent)
        breakers.met(outage, claim(agent, "math"))
    judge = Unprobed("the judge is out of reach", dependency="judge")
    judge.scorer = "judge"
    breakers.met(judge, claim("math", "judge"))
    waits = {breaker.dependency: breaker for breaker in breakers.open}
    for breaker in waits.values():
        breaker.next_try = time.monotonic() - FIRST_PAUSE_S

    def may_be_tried() -> set[str]:
        now = time.monotonic()
        return {name for name, breaker in waits.items() if breaker.lets_try(now)}

    assert may_be_tried() == {"searcher", "coder", "judge"}
    breakers.claimed(claim("math", "math"))  # it needs none of them
    breakers.claimed(claim("coder", "math", to_score=True))  # its trajectory is there
    assert may_be_tried() == {"searcher", "coder", "judge"}
    breakers.claimed(claim("searcher", "math"))
    assert may_be_tried() == {"coder", "judge"}
    breakers.claimed(claim("searcher", "0.5*judge + 0.5*math", to_score=True))
    assert may_be_tried() == {"coder"}
    assert breakers.trying
