"""`scripts/setup.sh` with a real venv and pip, on a package so small that it needs no network."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentrl.launcher.stack import REPOSITORY

# A package called agentrl with a command, and how pip is to build it: a wheel is a zip file.
BACKEND = """
import zipfile
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "agentrl-1-py3-none-any.whl"
    info = "agentrl-1.dist-info"
    files = {
        "agentrl_pointer.py": "def main(): print('agentrl runs')",
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: agentrl\\nVersion: 1\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        f"{info}/entry_points.txt": "[console_scripts]\\nagentrl = agentrl_pointer:main\\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(Path(folder) / name, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return name
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A project that needs nothing, with the real set-up script."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text("# nothing\n")
    yield tmp_path


def set_up(
    project: Path, want: str = "run", then: str = "agentrl", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Source the script in a fresh shell and run a command; no environment is active."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source scripts/setup.sh {want}; {then}"],
        cwd=project,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_first_call_sets_up_later_ones_skip_it_and_failed_or_interrupted_ones_are_done_again(
    project: Path,
) -> None:
    first = set_up(project)
    assert first.returncode == 0, first.stderr
    assert first.stdout == "agentrl runs\n"
    assert "setup: installing" in first.stderr

    began = time.monotonic()
    second = set_up(project, then="command -v agentrl")
    assert time.monotonic() - began < 1.0
    assert second.stdout.strip() == str(project / ".venv" / "bin" / "agentrl")
    assert second.stderr == ""

    for_tests = set_up(project, "dev")
    assert "requirements-dev.txt" in for_tests.stderr
    assert set_up(project).stderr == "", "a set-up for the tests holds what a run needs"

    (project / "requirements.txt").write_text("./no-such-folder\n")
    failed = set_up(project)
    assert failed.returncode != 0
    assert "pip failed" in failed.stderr and "agentrl runs" not in failed.stdout

    (project / "requirements.txt").write_text("# something else\n")
    (project / ".venv" / "agentrl-setup-begun").touch()  # as a set-up that was killed leaves it
    (project / ".venv" / "half-installed").touch()
    again = set_up(project)
    assert again.stdout == "agentrl runs\n", again.stderr
    assert not (project / ".venv" / "half-installed").exists()
    assert set_up(project).stderr == ""


def test_an_active_environment_that_has_agentrl_is_used_as_it_is(project: Path) -> None:
    active = project / "mine"
    (active / "bin").mkdir(parents=True)
    command = active / "bin" / "agentrl"
    command.write_text("#!/bin/sh\necho mine\n")
    command.chmod(0o755)
    assert set_up(project, VIRTUAL_ENV=str(active)).stdout == "mine\n"
    assert set_up(project, CONDA_PREFIX=str(active)).stdout == "mine\n"
    assert not (project / ".venv").exists()
    for_tests = set_up(project, "dev", VIRTUAL_ENV=str(active))
    assert for_tests.returncode != 0
    assert "requirements-dev.txt" in for_tests.stderr


def test_without_a_new_enough_python_it_says_what_to_do(project: Path) -> None:
    old = project / "old"
    old.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (old / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
        (old / name).chmod(0o755)
    result = set_up(project, PATH=f"{old}:/usr/bin:/bin")
    assert result.returncode == 1
    assert "no Python 3.11 or newer" in result.stderr and "Python 3.8.1" in result.stderr
    assert not (project / ".venv").exists()


def test_every_direct_dependency_is_pinned_and_installed_at_that_version() -> None:
    for file in ("requirements.txt", "requirements-dev.txt"):
        for line in (REPOSITORY / file).read_text().splitlines():
            if line.startswith("#"):
                continue
            requirement = Requirement(line)
            assert [pin.operator for pin in requirement.specifier] == ["=="], line
            if requirement.marker is None or requirement.marker.evaluate():
                # A build's own suffix, as in 2.13.0+cpu, is within the pin.
                assert requirement.specifier.contains(version(requirement.name)), line
