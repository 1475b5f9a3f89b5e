"""Stored turns as what they were when they were made: generations, token context, conversations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.databases.documents import DispatchedSamplingTask, StopReason
from agentrl.rollout.agents.recorded import generation_of
from agentrl.rollout.agents.turn import Turn
from agentrl.rollout.chat import ChatRenderer, Message
from agentrl.rollout.chat.tokens import TokenContext
from agentrl.rollout.groups.row_building import replay_turns


@dataclass(frozen=True, slots=True)
class RestoredTurns:
    """The turns of a Record in order, without those of other models, and the token context."""

    context: TokenContext
    turns: list[Turn]


def restored_turns(
    stored: Sequence[DispatchedSamplingTask], renderer: ChatRenderer
) -> RestoredTurns:
    """The turns as they were generated. Raises ValueError if they do not fit together."""
    context, tokens = replay_turns(stored)
    context.n_drifts = sum(turn.drift is not None for turn in stored)
    turns = []
    own = [document for document in stored if document.output_ids]
    for document, of_turn in zip(own, tokens, strict=True):
        made = replace(generation_of(document), replayed=document.replayed)
        cut_off = StopReason.MAX_NEW_TOKENS if made.finish_reason == "length" else None
        text = renderer.split_turn(made.output_ids)[0]
        turns.append(Turn(made, text, cut_off, of_turn))
    return RestoredTurns(context, turns)


def conversations_of(turns: Sequence[DispatchedSamplingTask]) -> list[list[Message]]:
    """For each stored turn of a program, the messages of its prompt and its reply.

    A turn stores only those that it does not share with an earlier one.
    """
    told: list[list[Message]] = []
    for turn in turns:
        shared = [] if turn.continues is None else told[turn.continues][: turn.n_continued]
        reply: Message = {"role": "assistant", "content": turn.output_text}
        told.append([*shared, *turn.messages, reply])
    return told
