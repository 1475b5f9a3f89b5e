"""Stored turns as requests and their answers: who asks the same again gets the recorded answer.

    recorded_turns     the turns of a Record, each with its whole prompt and its generation
    RecordedAnswers    the answers to requests that equal recorded ones, without a service
    ForkedAnswers      those of the turns before a fork
    Diverged           where nothing else may answer, and a request equals no recorded one

Requests are equal if their prompts have the same ids and their sampling parameters are the same.
Equal requests get their answers in the recorded order. So a program that does again what it did
gets the same tokens, with the logprobs and policy versions with which they were sampled.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.databases.arrays import pack_ints, unpack_floats, unpack_ints
from agentrl.databases.documents import DispatchedSamplingTask, ToolCall
from agentrl.databases.growing_tree import Ids
from agentrl.databases.token_tree import common_prefix
from agentrl.inference.protocol import FinishReason, Generation, SamplingParams
from agentrl.rollout.groups.row_building import replay

_Request = tuple[bytes, bytes]  # digest of the prompt, and the sampling parameters
_NO_PROMPT = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A stored turn as its request and the answer to it.

    `stored`: its document. `prompt`: ids [n], none in a turn of another model, which has no
    `generation` either. `params`: of the request, as `asked_with` gives them or as whoever asked
    the other model stored them; None for turns of earlier versions of the program, which did not.
    """

    stored: DispatchedSamplingTask
    prompt: NDArray[np.int32]
    generation: Generation | None

    @property
    def number(self) -> int:
        """Its place in its Record."""
        return self.stored.turn

    @property
    def params(self) -> Mapping[str, Any] | None:
        """What shaped the answer beside the prompt."""
        return self.stored.params


class Diverged(Exception):
    """A request equals none of the recorded turns that are left, and nothing is sampled."""


def asked_with(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters of a request as a turn stores them.

    Without stop tokens, which are the model's.
    """
    return {name: value for name, value in params.to_json().items() if name != "stop_token_ids"}


def recorded_turns(turns: Sequence[DispatchedSamplingTask]) -> list[RecordedTurn]:
    """The turns of one Record, in order, up to the first that is missing.

    An attempt that was killed may have stored a turn before an earlier one. Raises ValueError if
    the turns do not fit together.
    """
    stored = [turn for place, turn in enumerate(turns) if turn.turn == place]
    if not stored:
        return []
    context = replay(stored)
    lines = [context.line(segment)["ids"] for segment in range(len(context.segments))]
    return [
        RecordedTurn(turn, lines[turn.segment][: turn.prompt_len], generation_of(turn))
        if turn.output_ids
        else RecordedTurn(turn, _NO_PROMPT, None)
        for turn in stored
    ]


def generation_of(turn: DispatchedSamplingTask) -> Generation:
    """The answer of a service that a stored turn holds."""
    return Generation(
        output_ids=tuple(unpack_ints(turn.output_ids).tolist()),
        output_logprobs=tuple(unpack_floats(turn.output_logprobs).tolist()),
        finish_reason=cast(FinishReason, turn.finish_reason),
        versions=tuple(turn.versions),
        prompt_tokens=turn.prompt_len,
        cached_tokens=turn.cached_tokens,
        latency_s=turn.generate_latency_s,
        service=turn.service,
        replayed=turn.id,
    )


@dataclass(eq=False, slots=True)
class RecordedAnswers:
    """Answers from recorded turns, each of which answers once.

    `attempts`: turns of one or more attempts at the same rollout, the attempt that counts most
    first. Of equal requests, the k-th gets the answer of the first attempt that had so many.
    """

    attempts: Sequence[Sequence[RecordedTurn]]
    _answers: dict[_Request, deque[RecordedTurn]] = field(default_factory=dict, init=False)
    _turns: dict[str, RecordedTurn] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for turns in self.attempts:
            self._turns.update({turn.stored.id: turn for turn in turns})
            of_attempt: dict[_Request, list[RecordedTurn]] = {}
            for turn in turns:
                if turn.params is not None:
                    request = _request(turn.prompt, turn.params)
                    of_attempt.setdefault(request, []).append(turn)
            for request, answers in of_attempt.items():
                known = self._answers.setdefault(request, deque())
                known.extend(answers[len(known) :])

    def take(self, prompt_ids: Ids, params: Mapping[str, Any]) -> RecordedTurn | None:
        """The recorded turn of a request; None if there is none, or it was given already."""
        answers = self._answers.get(_request(prompt_ids, params))
        return answers.popleft() if answers else None

    def calls(self, turn: str) -> tuple[ToolCall, ...]:
        """The tool calls of the recorded turn with this id, with their results."""
        return tuple(self._turns[turn].stored.tool_calls)

    def nearest(self, prompt_ids: Ids) -> RecordedTurn | None:
        """Of the turns that have answered nothing yet, the one whose prompt is most like this one.

        Of several the first; None if there are none.
        """
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        return max(
            sorted(self.left(), key=lambda turn: turn.number),
            key=lambda turn: common_prefix(turn.prompt, prompt),
            default=None,
        )

    def left(self) -> Iterator[RecordedTurn]:
        """The turns that have answered nothing yet."""
        for answers in self._answers.values():
            yield from answers


class ForkedAnswers(RecordedAnswers):
    """The turns of a rollout before turn `number`, at which it is forked; then none.

    `earlier`: turns of earlier attempts at the fork. Whoever asks otherwise before that turn makes
    no fork of this rollout: `take` raises `Diverged`.
    """

    def __init__(
        self,
        rollout: Sequence[RecordedTurn],
        number: int,
        earlier: Sequence[Sequence[RecordedTurn]] = (),
    ) -> None:
        # First those of the rollout, so that its turns and the fork's own can be told apart.
        super().__init__([rollout[:number], *earlier])
        self._forked, self._missing = rollout[number], number

    @property
    def reached(self) -> bool:
        """Whether all turns before the fork were asked for."""
        return self._missing <= 0

    def take(self, prompt_ids: Ids, params: Mapping[str, Any]) -> RecordedTurn | None:
        """The recorded turn; None from the forked one on."""
        answer = super().take(prompt_ids, params)
        if answer is not None:
            self._missing -= answer.stored.record_id == self._forked.stored.record_id
        # Of several conversations at once, another one may have turns before the fork still.
        elif not self.reached and not np.array_equal(prompt_ids, self._forked.prompt):
            raise Diverged(
                f"the agent does not do again what it did before turn {self._forked.number} of "
                f"{self._forked.stored.record_id}, which is to be forked"
            )
        return answer


def _request(prompt_ids: Ids, params: Mapping[str, Any]) -> _Request:
    prompt = pack_ints(prompt_ids)
    return blake2b(prompt, digest_size=16).digest(), orjson.dumps(
        params, option=orjson.OPT_SORT_KEYS
    )
