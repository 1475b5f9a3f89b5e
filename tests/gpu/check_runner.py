"""Runs the checks of the first hour on a GPU: `bash tests/run_gpu.sh`.

Each check runs in a process of its own under a subreaper, with its own time limit. One that fails,
crashes, hangs or runs out of memory is reported by name, leaves nothing behind and hides no other.
One that is not done in time says so instead, because slowness is no fault; ok it is not.
Without a GPU the same checks run on the CPU with small models, as a rehearsal.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from check_list import CHECKS, Check
from surroundings import Surroundings, surroundings

from agentrl.subreaper import SUBREAPER

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Of all checks together: a check that begins late gets what is left.
WHOLE_S = {"cuda": 900.0, "cpu": 3600.0}
STATUSES = ("ok", "failed", "timed out", "not begun", "skipped")
_WELL = {"ok", "skipped"}
GRACE_S = 5.0  # for processes to end by themselves
# On a CPU several processes of a check compute at once.
_ENVIRONMENT = {"cuda": {}, "cpu": {"OMP_NUM_THREADS": "1"}}
# A stand-in takes a minute at most on two cores, and many times as long where others compute.
_SLOWER = {"cuda": 1, "cpu": 8}
_LAST_LINES = 25  # of the log of a check that failed, in the results


@dataclass(frozen=True)
class Result:
    """What came of a check."""

    name: str
    status: str  # of STATUSES
    seconds: float
    figures: dict[str, float | int | str | None] = field(default_factory=dict)
    error: str | None = None  # why it is not ok
    log_tail: str | None = None  # of a check that failed or timed out

    @property
    def line(self) -> str:
        """The result on one line."""
        figures = ", ".join(f"{name} {_short(value)}" for name, value in self.figures.items())
        said = "; ".join(part for part in (self.error, figures) if part)
        return f"{self.status:<10}{self.name:<28}{self.seconds:>6.1f} s  {said}".rstrip()


def run_check(check: Check, kind: str, gpus: int, folder: Path, limit_s: float) -> Result:
    """Run a check on a device of `kind` (cuda or cpu), at most `limit_s` seconds.

    `folder` is made for it and gets its `log`.
    """
    if kind == "cuda" and gpus < check.gpus:
        return Result(check.name, "skipped", 0.0, error=f"needs {check.gpus} GPUs")
    folder.mkdir(parents=True)
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-I", "-S", SUBREAPER, str(GRACE_S),
                sys.executable, str(HERE / "check_process.py"), check.function, kind, str(gpus),
                str(folder),
            ],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log,
            env={**_ENVIRONMENT[kind], **os.environ, **check.environment},
        )  # fmt: skip
        assert process.stdin is not None
        try:
            status: int | None = process.wait(timeout=max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.stdin.close()  # ends what the check has left running
            process.wait()
    seconds = round(time.monotonic() - began, 1)
    outcome_file = folder / "outcome.json"
    outcome = json.loads(outcome_file.read_text()) if outcome_file.exists() else {}
    figures = outcome.get("figures", {})
    if status == 0 and outcome.get("status") in _WELL:
        return Result(check.name, outcome["status"], seconds, figures, outcome["error"])
    if status is None:
        came, error = "timed out", f"not done within {limit_s:.0f} s"
    else:
        came, error = "failed", outcome.get("error") or f"its process ended with status {status}"
    lines = (folder / "log").read_text(errors="replace").splitlines()
    return Result(check.name, came, seconds, figures, error, "\n".join(lines[-_LAST_LINES:]))


def run_checks(
    checks: Sequence[Check], kind: str, gpus: int, folder: Path, whole_s: float
) -> list[Result]:
    """Run the checks one after the other, and print each result as it comes."""
    ends = time.monotonic() + whole_s
    results = []
    for check in checks:
        left = ends - time.monotonic()
        if left > 0:
            limit_s = min(_SLOWER[kind] * check.limit_s, left)
            result = run_check(check, kind, gpus, folder / check.name, limit_s)
        else:
            error = f"the checks before it took {whole_s:.0f} s"
            result = Result(check.name, "not begun", 0.0, error=error)
        print(result.line, flush=True)
        results.append(result)
    return results


def write_results(file: Path, where: Surroundings, results: Sequence[Result]) -> None:
    """Write everything that was found as JSON."""
    whole = {**asdict(where), "checks": [asdict(result) for result in results]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(whole, indent=2) + "\n")


def select(names: Sequence[str], checks: Sequence[Check]) -> list[Check]:
    """The checks of these names, or whose name begins with one and a dot; all if there are none.

    Raises `ValueError` for a name that is none.
    """
    for name in names:
        if not any(_is_named(check, name) for check in checks):
            raise ValueError(
                f"--only {name}: there is no such check, only "
                + ", ".join(check.name for check in checks)
            )
    return [c for c in checks if not names or any(_is_named(c, name) for name in names)]


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Run the checks that are asked for; exit status 1 if one failed or was not done."""
    parser = argparse.ArgumentParser(
        prog="tests/run_gpu.sh", description="Check everything that only a GPU can show."
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[],
        help="run this check, or all whose names begin with NAME and a dot; may be given again",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the checks, and run none")
    parser.add_argument(
        "--out", metavar="FILE", type=Path,
        help="file of the results (default: output/gpu/TIME/results.json)",
    )  # fmt: skip
    given = parser.parse_args(argv)
    try:
        chosen = select(given.only, checks)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        for check in chosen:
            needs = f" (needs {check.gpus} GPUs)" if check.gpus > 1 else ""
            print(f"{check.name:<28}{check.shows}{needs}")
        return 0
    where = surroundings()
    folder = ROOT / "output" / "gpu" / time.strftime("%Y%m%d-%H%M%S")
    file = given.out or folder / "results.json"
    print(where.line, flush=True)
    results = run_checks(chosen, where.device, len(where.gpus), folder, WHOLE_S[where.device])
    write_results(file, where, results)
    print(_summary(results, where))
    print(f"results: {file}\nlogs:    {folder}/NAME/log")
    return int(any(result.status not in _WELL for result in results))


def _is_named(check: Check, name: str) -> bool:
    return check.name == name or check.name.startswith(f"{name}.")


def _short(value: float | int | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _summary(results: Sequence[Result], where: Surroundings) -> str:
    counts = ", ".join(
        f"{sum(result.status == status for result in results)} {status}" for status in STATUSES
    )
    rehearsal = "" if where.device == "cuda" else ", on a CPU: this is a rehearsal"
    return "\n".join(["", *(result.line for result in results), counts + rehearsal])


if __name__ == "__main__":
    sys.exit(main())
