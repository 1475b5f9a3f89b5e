"""What AgentRL relies on of SGLang, asked of the SGLang of this machine: tests/contract.

In the stand-in it is the server of tests/run_sglang.sh, and a few of the tests.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from machine import CheckFailed, Figures, Machine
from service import require_sglang

ROOT = Path(__file__).parents[2]
# The tests compare float32 with transformers: kernels that have it, and no products in TF32.
_EXACT = "--attention-backend triton --sampling-backend pytorch --grammar-backend none"
_SMALL = "--disable-cuda-graph --max-total-tokens 16384 --mem-fraction-static 0.2"
_NAMED = 3  # failed tests in the result's line; the log has all


def contract(machine: Machine, figures: Figures) -> None:
    """Generating, weights and memory; how many tests passed, and those that failed by name."""
    files = ["test_sglang_api.py", "test_conformance.py"]
    _run(machine, figures, files if machine.on_gpu else files[:1])


def families(machine: Machine, figures: Figures) -> None:
    """The weights of mixtures of experts and multimodal models, by every way."""
    stand_in = [] if machine.on_gpu else ["-k", "qwen3_moe"]
    _run(machine, figures, ["test_model_families.py"], *stand_in)


def _run(machine: Machine, figures: Figures, files: Sequence[str], *chosen: str) -> None:
    command = require_sglang(machine)
    report = machine.folder / "report.xml"
    if machine.on_gpu:
        command = f"{command} {_EXACT} {_SMALL}"
    ended = subprocess.run(
        [
            # The first start of a new environment takes a while; the check has its own limit.
            sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "--timeout", "600",
            f"--junitxml={report}", *(f"tests/contract/{name}" for name in files), *chosen,
        ],
        cwd=ROOT, check=False,
        env=os.environ | {"SGLANG_COMMAND": command, "TRITON_F32_DEFAULT": "ieee"},
    )  # fmt: skip
    if not report.exists():
        raise CheckFailed(f"pytest ended with status {ended.returncode} and no report")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [_name(case) for case in cases if _has(case, "failure") or _has(case, "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    passed = len(cases) - len(failed) - skipped
    figures.add(passed=passed, failed=len(failed), skipped=skipped)
    if failed:
        more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        raise CheckFailed(f"{len(failed)} tests failed: {', '.join(failed[:_NAMED])}{more}")
    if ended.returncode or not passed:
        raise CheckFailed(f"pytest ended with status {ended.returncode}, {passed} tests passed")


def _has(case: ElementTree.Element, what: str) -> bool:
    return case.find(what) is not None


def _name(case: ElementTree.Element) -> str:
    return case.get("name", "?")
