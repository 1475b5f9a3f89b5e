"""Reads a run's state, steps, success, size and place from its folder, without its database."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrl.configs import ConfigError
from agentrl.launcher.presets import EVALUATIONS, SAMPLE
from agentrl.launcher.run_folder import LaunchRecord, last_checkpoint, lock_holder, read_launch
from agentrl.launcher.run_parts import disk_bytes, parts_of
from agentrl.redaction import without_passwords

_TAIL_BYTES = 1 << 16  # of metrics.jsonl: some ten lines
_SIGNALLED = 128
_ROUNDING = 1e-9  # of a number of epochs


class State(StrEnum):
    """The state of a run."""

    LIVE = "live"
    FINISHED = "finished"
    STOPPED = "stopped"  # the same command resumes it
    FAILED = "failed"  # the last launch ended with an error
    BROKEN = "broken"  # one of its files cannot be read


@dataclass(frozen=True)
class RunRow:
    """A row of `agentrl runs`. None is unknown."""

    name: str
    state: State
    note: str  # which process runs it, why it ended, or what is broken
    step: int
    max_steps: int | None
    before: float | None  # success on the held-out tasks, first and last evaluation
    after: float | None  # of evaluations only: that of the last one
    bytes: int
    changed: float | None  # seconds since 1970
    folder: str | None
    database: str | None  # `embedded` or a URL


class _Unreadable(Exception):
    """A file of the run cannot be read."""


def read_run(folder: Path) -> RunRow | None:
    """Read the run of a folder; None if no run ever wrote there."""
    parts = parts_of(folder)
    if not parts:
        return None
    launch: LaunchRecord | None = None
    summary: Mapping[str, Any] = {}
    saved: Mapping[str, Any] = {}
    last: Mapping[str, Any] = {}
    step, note, state = 0, "", None
    success, evaluated = None, ""
    try:
        launch = _read_launch(folder)
        summary = _read_object(folder / "summary.json")
        last = _last_line(folder / "metrics.jsonl")
        step = max(last.get("step", 0), last_checkpoint(folder) or 0)
        saved = _read_checkpoint(folder)
        success, evaluated = _evaluated(folder, launch)
    except _Unreadable as error:
        state, note = State.BROKEN, str(error)
    flags = saved.get("config") or {}
    most = (launch and launch.max_steps) or _flag(launch, "max_steps")
    most = int(most or flags.get("optimizer", {}).get("max_steps") or 0)
    held_out = launch.held_out if launch else ()
    before, after = (held_out[0], held_out[-1]) if held_out else (None, success)
    holder = lock_holder(folder)
    if holder is not None:
        state, note = State.LIVE, _who(holder)
    elif state is None and launch is None and (folder / "rows").is_dir():
        state, note = _supervised_state(folder, last, flags)
    elif state is None:
        state, note = _state(folder, launch, summary, step, most)
    done = state is State.FINISHED
    if done and evaluated:
        note = evaluated
    if done and step and most <= 0:
        most = step  # a number of epochs was given
    # Commands that only read start mongod too, which changes its folder.
    told = [part for part in parts if part.name != "mongo"] or parts
    embedded = (folder / "mongo").exists()
    url = launched_at(launch) or (launch and launch.withheld.get("db_connection_string"))
    url = url or flags.get("run", {}).get("db_connection_string")
    return RunRow(
        name=folder.name,
        state=state,
        note=note,
        step=step,
        max_steps=most if most > 0 else None,
        before=summary.get("eval_before", before) if done else before,
        after=summary.get("eval_after", after) if done else after,
        bytes=sum(map(disk_bytes, parts)),
        changed=max(os.lstat(part).st_mtime for part in told if os.path.lexists(part)),
        folder=str(folder),
        database="embedded" if embedded else without_passwords(url) if url else None,
    )


def _state(
    folder: Path, launch: LaunchRecord | None, summary: Mapping[str, Any], step: int, most: int
) -> tuple[State, str]:
    """State and note of a run that is not live."""
    if summary and summary["steps"] >= max(step, most):
        return State.FINISHED, ""
    if launch is not None and launch.preset in (SAMPLE.name, EVALUATIONS) and launch.status == 0:
        return State.FINISHED, ""
    checkpoint = last_checkpoint(folder)
    left = "no checkpoint yet" if checkpoint is None else f"resumes from checkpoint-{checkpoint}"
    if launch is None:
        return State.STOPPED, f"by hand; {left}"
    if launch.status is None:
        return State.STOPPED, f"killed; {left}"
    if 0 < launch.status < _SIGNALLED:
        return State.FAILED, launch.ended
    return State.STOPPED, left


def _supervised_state(
    folder: Path, last: Mapping[str, Any], flags: Mapping[str, Any]
) -> tuple[State, str]:
    """State and note of a run of `agentrl sft` or `agentrl dpo`, which no launch began.

    `last`: the last line of its metrics. `flags`: those of its last checkpoint.
    """
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return State.STOPPED, "no checkpoint yet"
    most = flags.get("optimizer", {}).get("max_steps") or 0
    if most <= 0:
        epochs = flags.get("data", {}).get("num_train_epochs", math.inf)
        done = last.get("step") == checkpoint and last.get("epoch", 0) >= epochs - _ROUNDING
    else:
        done = checkpoint >= most
    return (
        (State.FINISHED, "") if done else (State.STOPPED, f"resumes from checkpoint-{checkpoint}")
    )


def _evaluated(folder: Path, launch: LaunchRecord | None) -> tuple[float | None, str]:
    """Of a run of evaluations only: the success that the last found, and what it was of."""
    if launch is None or launch.preset != EVALUATIONS:
        return None, ""
    reports = sorted((folder / "eval").glob("model-*.json"), key=lambda file: file.stat().st_mtime)
    if not reports:
        return None, ""
    last = _read_object(reports[-1])
    first = (last.get("pass_at") or {}).get("1") or {}
    count = f"{len(reports)} evaluations, the last: " if len(reports) > 1 else ""
    return first.get("mean"), f"{count}{last.get('checkpoint')} on {last.get('task_file')}"


def _who(process: str) -> str:
    """Describe one of our processes by its command line."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:
        return f"processes of launch {process}, which has ended"
    verb = next((word for word in words if word in ("launch", "eval", "delete")), "process")
    return f"{verb}, process {process}"


def launched_at(launch: LaunchRecord | None) -> str | None:
    """The URL of the MongoDB of the run's launch, if it was given one without a password."""
    return _flag(launch, "db_connection_string")


def _flag(launch: LaunchRecord | None, name: str) -> str | None:
    """The last value of a flag. Flags are not parsed, because other versions had other flags."""
    value = None
    words = list(launch.flags) if launch else []
    for word, following in pairwise([*words, ""]):
        if word == f"--{name}":
            value = following
        elif word.startswith(f"--{name}="):
            value = word.partition("=")[2]
    return value


def _read_launch(folder: Path) -> LaunchRecord | None:
    try:
        return read_launch(folder)
    except ConfigError:
        raise _Unreadable("launch.json cannot be read") from None


def _read_object(file: Path) -> Mapping[str, Any]:
    """A JSON object, empty if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _Unreadable(f"{file.name} cannot be read")
    return value


def _last_line(metrics: Path) -> Mapping[str, Any]:
    """The last complete line, with its step; empty without a file or line."""
    if not metrics.is_file():
        return {}
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    try:
        found = json.loads(whole[-1]) if whole else {}
        return {**found, "step": int(found["step"])} if whole else {}
    except (ValueError, KeyError, TypeError):
        raise _Unreadable("the last line of metrics.jsonl cannot be read") from None


def _read_checkpoint(folder: Path) -> Mapping[str, Any]:
    """The trainer state of the last checkpoint. Raises `_Unreadable` if a file is missing."""
    step = last_checkpoint(folder)
    if step is None:
        return {}
    checkpoint = folder / f"checkpoint-{step}"
    if not any(checkpoint.glob("*.distcp")):
        return {}  # of another program
    state = _read_object(checkpoint / "trainer_state.json")
    wanted = [f"__{rank}_*.distcp" for rank in range(state.get("processes") or 0)]
    for name in (".metadata", "trainer_state.json", *wanted):
        if not any(checkpoint.glob(name)):
            raise _Unreadable(f"{checkpoint.name} has no {name.replace('*', '0')}")
    return state
