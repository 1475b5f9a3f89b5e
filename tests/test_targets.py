"""What `tests/run_*.sh` run when only options are given: the tests of their own suite."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "tests").glob("run_*.sh"))


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ([], ["tests/browser"]),
        (["-x"], ["-x", "tests/browser"]),
        (["-x", "-k", "a page"], ["-x", "-k", "a page", "tests/browser"]),
        (["tests/prometheus", "-x"], ["tests/prometheus", "-x"]),
        (["-x", "tests/test_docs.py::test_a"], ["-x", "tests/test_docs.py::test_a"]),
    ],
)
def test_a_suite_runs_its_own_tests_unless_others_are_named(
    given: list[str], run: list[str]
) -> None:
    shell = (
        'source tests/targets.sh; with_target tests/browser "$@"; printf "%s\\n" "${arguments[@]}"'
    )
    done = subprocess.run(
        ["bash", "-euc", shell, "bash", *given],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.splitlines() == run


def test_every_script_of_a_suite_names_its_tests_so() -> None:
    others = {"run_gpu.sh"}  # its checks are no tests
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        if script.name in others:
            continue
        [target] = re.findall(r'^with_target (\S+) "\$@"$', text, re.MULTILINE)
        assert (ROOT / target).is_dir(), script.name
        assert text.endswith('"${arguments[@]}"\n'), script.name
        assert f"default: all of {target}]" in text, script.name
    assert len(SCRIPTS) > 6
