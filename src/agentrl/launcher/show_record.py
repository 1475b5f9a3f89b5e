"""`agentrl show RUN RECORD`: a Record as people read it: facts, conversation and score."""

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from agentrl.databases.conversation import call_text
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    Replay,
    ToolCall,
    TurnStatus,
)

_ROLE_STYLES = {"system": "dim", "user": "cyan"}


def print_record(
    console: Console,
    record: Record,
    turns: Sequence[DispatchedSamplingTask],
    answer: str | None = None,
) -> None:
    """Print a Record: facts, conversation and score. `answer`: the task's right answer."""
    versions = record.versions
    facts = [
        f"task {record.task_id}, rollout {record.rollout} of its group, {record.split} epoch"
        f" {record.epoch}" + (f", agent {record.agent_name}" if record.agent_name else ""),
        f"{record.n_turns} turns, {record.n_tool_calls} tool calls ({record.n_tool_errors} errors),"
        f" {record.tokens.generated} tokens generated",
    ]
    if record.fork is not None:
        facts.append(f"a fork of {record.fork.record} at turn {record.fork.turn}")
    if record.replay is not None:
        facts.append(_replayed(record.replay))
    if versions is not None:
        facts.append(f"policy versions {versions.min} to {versions.max}")
    if record.tools_offered:
        facts.append(f"tools in the prompt: {', '.join(record.tools_offered)}")
    console.print(Panel(Text("\n".join(facts)), title=record.id))
    if record.own_calls:
        console.print(Rule("calls that belong to no turn", align="left", style="dim"))
        _print_calls(console, record.own_calls)
    answered = True
    for turn in turns:
        for message in turn.messages:
            if message.get("role") == "tool" and answered:
                continue  # shown with its call
            role = str(message.get("role"))
            console.print(Rule(role, align="left", style="dim"))
            console.print(Text(str(message.get("content") or ""), _ROLE_STYLES.get(role, "")))
        if turn.rewrite is not None:
            told = Rule(f"conversation rewritten: {turn.rewrite}", align="left", style="yellow")
            console.print(told)
        parts = [
            f"turn {turn.turn}",
            "" if turn.status == TurnStatus.COMPLETED else turn.status,
            turn.agent or "",
            f"by {turn.service}" if turn.agent and not turn.output_ids else "",
            "" if turn.trained else "not trained",
            "" if turn.replayed is None else f"replayed from {turn.replayed}",
        ]
        head = " · ".join(["assistant", *filter(None, parts)])
        console.print(Rule(head, align="left", style="dim"))
        console.print(Text(turn.output_text, "bold"))
        if turn.format_error:
            console.print(Text(f"not understood: {turn.format_error}", "red"))
        _print_calls(console, turn.tool_calls)
        # Calls that a program made itself: their results are messages of a later turn.
        answered = all(call.result is not None for call in turn.tool_calls)
    console.print(Rule(style="dim"))
    if record.error:
        console.print(Text(f"failed: {record.error}", "red"))
    else:
        advantage = "" if record.advantage is None else f" · advantage {record.advantage:+.3f}"
        console.print(
            Text.assemble(
                ("answer ", "dim"), (str(record.final_answer), "bold"),
                (f" · {record.stop_reason} · score ", "dim"), (f"{record.score}", "bold"),
                (advantage, "dim"),
            )
        )  # fmt: skip
    if answer is not None:
        console.print(Text.assemble(("right answer ", "dim"), (answer, "bold")))
    if len(record.scores) > 1 or record.explanations:
        for scorer, score in record.scores.items():
            explanation = record.explanations.get(scorer, "")
            console.print(Text.assemble(f"  {scorer} {score}", (f"  {explanation}", "dim")))
    for agent, reward in record.agent_rewards.items():
        own = record.agent_advantages.get(agent)
        said = f"  agent {agent} · reward {reward:g}"
        console.print(Text(said + ("" if own is None else f" · advantage {own:+.3f}"), "dim"))
    if record.left_out:
        console.print(Text(f"  not trained: {record.left_out}", "dim"))


def _replayed(replay: Replay) -> str:
    """How much of a Record was answered by stored turns."""
    told = f"{replay.turns} turns, {replay.tokens} tokens replayed from the ledger"
    return told if replay.diverged is None else f"{told}; diverged at turn {replay.diverged}"


def _print_calls(console: Console, calls: Sequence[ToolCall]) -> None:
    """Print one line for each call and its result. Calls by the agent's code are marked."""
    for call in calls:
        if not call.name:
            continue  # it could not be parsed; the turn has the error
        style = "red" if call.is_error else "green"
        took = f"   {call.latency_s * 1000:.0f} ms"
        known = call.result is not None
        result = [("  ⇒  ", "dim"), (str(call.result), style), (took, "dim")] if known else []
        console.print(
            Text.assemble(
                ("  agent → " if call.by_agent else "  → ", "dim"),
                call_text(call),
                *result,
            )
        )
