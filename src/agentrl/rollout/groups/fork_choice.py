"""`--fork_at`: the turns at which a finished rollout is sampled anew. Pure.

    entropy            those whose tokens were least certain: the greatest mean of -logprob, which
                       estimates the entropy of the policy along the turn
    every              spread evenly over the turns
    after_tool_error   those that follow a failed call of a tool, the first ones

The first turn is not among them: the rollouts of a group are its forks. Nor are turns that are not
trained, as those of a program's other agents, nor those after a call that left a state which a fork
would not have.
"""

from collections.abc import Sequence

from agentrl.databases.arrays import unpack_floats
from agentrl.databases.documents import DispatchedSamplingTask


def fork_turns(turns: Sequence[DispatchedSamplingTask], at: str, count: int) -> list[int]:
    """Up to `count` numbers of turns at which to fork, in order. `turns`: all of a Record."""
    changing = (turn.turn for turn in turns if any(call.lasting for call in turn.tool_calls))
    last = next(changing, len(turns))  # its own calls are made after it is sampled
    trained = [turn for turn in turns[1:] if turn.trained and turn.turn <= last]
    numbers = [turn.turn for turn in trained]
    if at == "entropy":
        ranked = sorted(trained, key=lambda turn: (-_uncertainty(turn), turn.turn))
        return sorted(turn.turn for turn in ranked[:count])
    if at == "after_tool_error":
        failed = [turn.turn for turn in turns if any(call.is_error for call in turn.tool_calls)]
        return [turn + 1 for turn in failed if turn + 1 in numbers][:count]
    assert at == "every", f"--fork_at {at} is not among its choices"
    if len(numbers) <= count:
        return numbers
    return [numbers[place * len(numbers) // count] for place in range(count)]


def _uncertainty(turn: DispatchedSamplingTask) -> float:
    return -float(unpack_floats(turn.output_logprobs).mean())
