"""Rewriting a conversation that is too long or repeats itself: pure functions.

    head | turn, results | turn, results | ... | last turn, results

The head is the task's first messages. Every function takes and returns the entries of a
conversation. Unchanged entries are the same objects, so generated turns keep their sampled ids, and
the new segment shares everything before the first change.

    discard_results     earlier results become a note            --new_context discard_all_tools
    ask_for_summary     set the last turn aside, ask the model   --new_context discard_all
    restart             head and summary, then the last turn     --new_context discard_all
    take_out_last_turn  remove a turn that repeats               --remove_repeated_turns

Instructions to the model are appended to the last result, not sent as a separate message: some chat
templates accept no user message there, others drop the thoughts of all earlier turns, which changes
sampled tokens.
"""

from collections.abc import Sequence

from agentrl.rollout.chat import Entry, Message

DISCARDED = "[This result was removed to make room. Call the tool again if you need it.]"
SUMMARY_REQUEST = """\
[Not from the tool: the conversation has become too long. In this turn call no tool. Write down all
that you need to go on: what you have done and found out (facts, names, numbers, addresses, exactly
as they are), what did not work, and what is left to do. Everything after the task will be removed,
and only this text kept.]"""
TAKEN_OUT = """\
[Not from the tool: your next turn was taken out of the conversation. It only repeated calls that
you had made before, with the same results. Do something else, or answer with what you know.]"""
_NOTES = "Your notes on what you have done so far:"


def last_turn(entries: Sequence[Entry]) -> int:
    """The index of the last generated turn."""
    return max(place for place, entry in enumerate(entries) if entry.output_ids)


def discard_results(entries: Sequence[Entry]) -> list[Entry]:
    """Replace each tool result before the last turn by a note, if the note is shorter."""
    last = last_turn(entries)
    return [
        Entry({**entry.message, "content": DISCARDED})
        if place < last
        and entry.message["role"] == "tool"
        and len(entry.message["content"]) > len(DISCARDED)
        else entry
        for place, entry in enumerate(entries)
    ]


def ask_for_summary(entries: Sequence[Entry]) -> list[Entry] | None:
    """The conversation before its last turn, with a request for a summary.

    None if the last turn is the first, so that there is nothing to summarise.
    """
    earlier = entries[: last_turn(entries)]
    return _tell(earlier, SUMMARY_REQUEST) if earlier[-1].message["role"] == "tool" else None


def restart(head: Sequence[Message], summary: str, entries: Sequence[Entry]) -> list[Entry]:
    """The head with the summary in its last message, then the last turn and its results.

    The last turn and its results stay as they are, so its calls need not be repeated.
    """
    question = head[-1]
    content = f"{question['content']}\n\n{_NOTES}\n{summary}"
    return [
        *map(Entry, head[:-1]),
        Entry({**question, "content": content}),
        *entries[last_turn(entries) :],
    ]


def take_out_last_turn(entries: Sequence[Entry]) -> list[Entry]:
    """The conversation without its last turn, with a note in the result before it.

    There is such a result, because the turn repeats an earlier one.
    """
    return _tell(entries[: last_turn(entries)], TAKEN_OUT)


def _tell(entries: Sequence[Entry], text: str) -> list[Entry]:
    message = entries[-1].message
    content = f"{message['content']}\n\n{text}".lstrip()
    return [*entries[:-1], Entry({**message, "content": content})]
