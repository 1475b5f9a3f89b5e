"""A Record at its end, as it is handed over to be traced."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.databases.documents import DispatchedSamplingTask, Record


class Failure(StrEnum):
    """Why an attempt ended without a score: the value of `error.type`."""

    INFRASTRUCTURE = "infrastructure"  # a dependency was out of reach
    CODE = "code"  # the agent or a tool raised, or took too long
    SCORING = "scoring"  # the scorer failed too often: quarantined
    SILENT = "silent"  # its program, on another machine, went silent
    HANDED_BACK = "handed_back"  # it was told to stop: no failure


@dataclass(frozen=True, slots=True)
class EndedRecord:
    """A Record at its end, with its stored turns. `failure`: None if it was scored."""

    record: Record
    turns: Sequence[DispatchedSamplingTask]
    failure: Failure | None = None


@dataclass(slots=True)
class KeptTurns:
    """The stored turns of a Record that is being sampled, in the order of their storing."""

    turns: list[DispatchedSamplingTask] = field(default_factory=list)

    def add(self, turn: DispatchedSamplingTask) -> None:
        """Keep a turn without its tokens, which no trace has."""
        no_tokens = {"prompt_delta_ids": b"", "output_ids": b"", "output_logprobs": b""}
        self.turns.append(turn.model_copy(update=no_tokens))
