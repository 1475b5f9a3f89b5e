"""A scorer is a function that takes, by name, what it needs:

    model_answer   the Record's final answer (without one it scores 0 and is not called)
    ground_truth   the task's `answer` (a task without one is refused)
    question       the task's `query`
    task, record   the documents themselves
    scorer_agent_config   the section `scorer_agent` of the agent file, as a dictionary
    messages       the Record's conversation, as chat messages

or, to look at a whole group at once:

    records        all scored Records of the Task
    messages       the conversation of each of them
    task, question, ground_truth as above

It may be async or not; a function that is not runs in a thread. It returns a number or a boolean,
also of numpy or torch, None (not scored), or a `Score` with an explanation; for a group a list of
these, one for each Record.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from agentrl.databases.documents import DispatchedSamplingTask, Record, Task
from agentrl.foreign_text import shown
from agentrl.rollout.contained import contained
from agentrl.rollout.scorers.results import Score, as_list, as_score
from agentrl.rollout.scorers.threads import ScorerThreads

ScorerFunction = Callable[..., Any]
Messages = list[dict[str, Any]]

_OF_TASK = frozenset({"ground_truth", "question", "task", "messages", "scorer_agent_config"})
_OF_RECORD = _OF_TASK | {"model_answer", "record"}
_OF_GROUP = _OF_TASK | {"records"}
_JUDGED = frozenset({"model_answer", "record", "records", "messages"})  # one of them is required


@dataclass(frozen=True)
class Scorer:
    """A scorer function with its name.

    `takes`: the names of its inputs. `config`: the section `scorer_agent` of the agent file.
    """

    name: str
    function: ScorerFunction
    takes: frozenset[str]
    threads: ScorerThreads = field(compare=False, repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, function: ScorerFunction) -> Self:
        """The scorer of a function.

        Raises ValueError if the function requires other inputs, or takes nothing of the Record.
        """
        if not callable(function):
            raise ValueError(f"scorer {name!r} is {shown(function)}, which is no function")
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # some functions written in C have no signature
            raise ValueError(
                f"scorer {name!r} is {shown(function)}, whose parameters cannot be seen: wrap it "
                "in a function of yours"
            ) from None
        known = _OF_GROUP if "records" in parameters else _OF_RECORD
        for parameter in parameters.values():
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            needed = parameter.default is parameter.empty
            if needed and not (by_name and parameter.name in known):
                raise ValueError(
                    f"scorer {name!r} takes `{parameter.name}`; a scorer takes, by name, of "
                    f"{', '.join(sorted(known))}"
                )
        takes = frozenset(known & parameters.keys())
        if not takes & _JUDGED:
            raise ValueError(
                f"scorer {name!r} takes nothing of the Record; it must take one of "
                f"{', '.join(sorted(_JUDGED))}"
            )
        return cls(name, function, takes, ScorerThreads(name))

    @property
    def of_group(self) -> bool:
        """Whether it scores a whole group at once."""
        return "records" in self.takes

    @property
    def needs_answer(self) -> bool:
        """Whether it requires tasks with an `answer`."""
        return "ground_truth" in self.takes

    @property
    def needs_messages(self) -> bool:
        """Whether it takes conversations."""
        return "messages" in self.takes

    async def score(self, task: Task, record: Record, messages: Messages) -> Score:
        """Score one Record. Raises errors of the function, and ValueError for an invalid result."""
        if "model_answer" in self.takes and record.final_answer is None:
            return Score(0.0, "no answer in the form asked for")
        inputs = {"record": record, "model_answer": record.final_answer, "messages": messages}
        return as_score(self.name, await self._call(task, inputs))

    async def score_group(
        self, task: Task, records: Sequence[Record], messages: Sequence[Messages]
    ) -> list[Score]:
        """Score all Records [n] of a group; returns n results. Raises as `score` does."""
        inputs = {"records": list(records), "messages": list(messages)}
        returned = await self._call(task, inputs)
        results = as_list(returned)
        if results is None or len(results) != len(records):
            raise ValueError(
                f"scorer {self.name!r} returned {shown(returned)}, not a list with a score for "
                f"each of the {len(records)} Records"
            )
        return [as_score(self.name, result) for result in results]

    async def _call(self, task: Task, inputs: Mapping[str, object]) -> object:
        if self.needs_answer and task.answer is None:
            raise ValueError(f"the task has no `answer`, which scorer {self.name!r} compares with")
        given = {
            "task": task,
            "question": task.query,
            "ground_truth": task.answer,
            "scorer_agent_config": self.config,
            **inputs,
        }
        # Copies: a function may change its inputs, but not the Record that is stored.
        arguments = {name: copy.deepcopy(given[name]) for name in self.takes}
        return await contained(self._result(arguments), f"scorer {self.name!r}")

    async def _result(self, arguments: Mapping[str, object]) -> object:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        result = await self.threads.run(lambda: self.function(**arguments))
        # An object with an async `__call__` returns its coroutine from the thread.
        return await result if inspect.isawaitable(result) else result


def conversation(turns: Sequence[DispatchedSamplingTask]) -> Messages:
    """The stored chat messages of a Record's turns, in order.

    If the context was rewritten, every message is in it once.
    """
    messages: Messages = []
    for turn in turns:
        messages += turn.messages
        messages.append({"role": "assistant", "content": turn.output_text})
    return messages
