"""What AgentRL relies on of SGLang, asked of the SGLang of this machine: tests/contract.

In the stand-in it is the server of tests/run_sglang.sh, and the tests of its API alone.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from machine import CheckFailed, Figures, Machine
from service import require_sglang

ROOT = Path(__file__).parents[2]
# The whole contract of generating, weights and memory, and the names of families' weights.
_FILES = ("test_conformance.py", "test_sglang_api.py", "test_model_families.py")
_QUICK = ("test_sglang_api.py",)
# The tests compare float32 with transformers: kernels that have it, and no products in TF32.
_EXACT = "--attention-backend triton --sampling-backend pytorch --grammar-backend none"
_SMALL = "--disable-cuda-graph --max-total-tokens 16384 --mem-fraction-static 0.2"
_NAMED = 3  # failed tests in the result's line; the log has all


def contract(machine: Machine, figures: Figures) -> None:
    """How many tests passed; those that failed by name."""
    command = require_sglang(machine)
    report = machine.folder / "report.xml"
    files = _FILES if machine.on_gpu else _QUICK
    if machine.on_gpu:
        command = f"{command} {_EXACT} {_SMALL}"
    ended = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow",
            f"--junitxml={report}", *(str(ROOT / "tests" / "contract" / name) for name in files),
        ],
        cwd=ROOT, check=False,
        env=os.environ | {"SGLANG_COMMAND": command, "TRITON_F32_DEFAULT": "ieee"},
    )  # fmt: skip
    if not report.exists():
        raise CheckFailed(f"pytest ended with status {ended.returncode} and no report")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [_name(case) for case in cases if _has(case, "failure") or _has(case, "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    figures.add(passed=len(cases) - len(failed) - skipped, failed=len(failed), skipped=skipped)
    if failed:
        more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        raise CheckFailed(f"{len(failed)} tests failed: {', '.join(failed[:_NAMED])}{more}")
    if ended.returncode or not cases:
        raise CheckFailed(f"pytest ended with status {ended.returncode} after {len(cases)} tests")


def _has(case: ElementTree.Element, what: str) -> bool:
    return case.find(what) is not None


def _name(case: ElementTree.Element) -> str:
    return case.get("name", "?")
