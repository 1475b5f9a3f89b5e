"""`scripts/setup.sh` with a real venv and pip, on a package so small that it needs no network."""

import os
import pty
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pip
import pytest
from packaging.requirements import Requirement

from agentrl.launcher.deployment import REPOSITORY

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
    for name in ("setup.sh", "installing.py"):
        shutil.copy(REPOSITORY / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text("# nothing\n")
    yield tmp_path


def make_environment(project: Path, name: str = ".venv") -> None:
    """What a set-up begins with, as it would make it, in a tenth of the time: pip is copied."""
    venv.create(project / name, with_pip=False, symlinks=True)
    packages = Path(pip.__file__).parents[1]
    (there,) = (project / name).glob("lib/python*/site-packages")
    for folder in (packages / "pip", *packages.glob("pip-*.dist-info")):
        shutil.copytree(folder, there / folder.name)


def path_without(command: str) -> str:
    """PATH but for the folders that hold this command."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(f for f in folders if not (Path(f) / command).exists())


def set_up(
    project: Path, want: str = "run", then: str = "agentrl", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Source the script in a fresh shell and run a command; no environment is active."""
    command = f"set -euo pipefail; source scripts/setup.sh {want}; {then}"
    return in_shell(project, command, **environment)


def in_shell(project: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh shell in the project; no environment is active, and no uv is found."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=project,
        env={**inherited, "PATH": path_without("uv"), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_the_first_call_sets_up_later_ones_skip_it_and_failed_or_interrupted_ones_are_done_again(
    project: Path,
) -> None:
    first = set_up(project)
    assert first.returncode == 0, first.stderr
    assert first.stdout == "agentrl runs\n"
    assert "setup: installing" in first.stderr
    assert "source .venv/bin/activate" in first.stderr.splitlines()[-1]
    activated = f"source {first.stderr.split()[-1]}; agentrl; python -c 'import agentrl_pointer'"
    assert in_shell(project, activated).stdout == "agentrl runs\n"
    said = first.stderr.splitlines()
    assert all(line.startswith("setup: ") for line in said), "pip's pages are in the log"
    assert "Successfully installed agentrl" in (project / ".cache" / "setup.log").read_text()

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
    assert "no-such-folder" in failed.stderr, "the last lines of the error"
    assert str(project / ".cache" / "setup.log") in failed.stderr.splitlines()[-1]

    (project / "requirements.txt").write_text("# something else\n")
    (project / ".venv" / "agentrl-setup-begun").touch()  # as a set-up that was killed leaves it
    (project / ".venv" / "half-installed").touch()
    again = set_up(project)
    assert again.stdout == "agentrl runs\n", again.stderr
    assert not (project / ".venv" / "half-installed").exists()
    assert set_up(project).stderr == ""


def test_without_a_network_it_says_so_in_one_sentence(project: Path) -> None:
    make_environment(project)
    (project / "requirements.txt").write_text("no-such-package==1\n")
    nowhere = "http://127.0.0.1:9/simple"  # the port of `discard`: nobody listens
    # What this machine tells pip of its own indexes is not meant here.
    only = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": nowhere, "PIP_RETRIES": "1",
           "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}  # fmt: skip
    result = set_up(project, **only)
    assert result.returncode != 0
    *_, last = lines = result.stderr.splitlines()
    assert all(line.startswith("setup: ") for line in lines), result.stderr
    assert [line for line in lines if "failed" in line] == [last]
    assert "cannot reach the package index" in last and "setup.log" in last
    assert "no-such-package" in (project / ".cache" / "setup.log").read_text()


@pytest.mark.slow  # three installations
def test_uv_installs_where_it_is_there_and_pip_where_uv_fails_or_pip_alone_has_an_index(
    project: Path,
) -> None:
    make_environment(project)
    uv = project / "with-uv" / "uv"  # says what it was asked, then does it or does not
    uv.parent.mkdir()
    uv.write_text(
        '#!/bin/bash\necho "$@" >>asked\n[ ! -e broken ] || exit 2\n'
        'exec "$4" -m "${@:1:2}" "${@:5}"\n'
    )
    uv.chmod(0o755)
    plain = {"PATH": f"{uv.parent}:{path_without('uv')}", "PIP_CONFIG_FILE": os.devnull}
    unset = "unset ${!PIP_*} ${!UV_*}; export PIP_CONFIG_FILE=/dev/null; "
    begin = unset + "set -euo pipefail; source scripts/setup.sh run; agentrl"
    first = in_shell(project, begin, **plain)
    assert first.stdout == "agentrl runs\n", first.stderr
    first_call, second_call = (project / "asked").read_text().splitlines()
    python = project / ".venv" / "bin" / "python"
    assert first_call == f"pip install --python {python} -r {project / 'requirements.txt'}"
    assert second_call.endswith(f"--no-deps --no-build-isolation -e {project}")

    (project / "requirements.txt").write_text("# with a uv that fails\n")
    (project / "broken").touch()
    second = in_shell(project, begin, **plain)
    assert second.stdout == "agentrl runs\n", second.stderr
    assert "uv failed" in second.stderr and "going on with pip" in second.stderr

    (project / "requirements.txt").write_text("# with an index of pip's own\n")
    (project / "asked").unlink()
    third = in_shell(
        project, begin.replace("set -euo", f"export PIP_FIND_LINKS={project}; set -euo"), **plain
    )
    assert third.stdout == "agentrl runs\n", third.stderr
    assert not (project / "asked").exists()


def test_in_a_terminal_one_line_moves_and_says_how_far_it_is(tmp_path: Path) -> None:
    told = (
        "Collecting torch==2.13.0 (from -r requirements.txt (line 2))",
        "  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (858.2 MB)",
        "Progress 429100000 of 858200000",
        "Installing collected packages: mpmath, sympy, torch",
    )
    installer = tmp_path / "installer.py"
    installer.write_text(
        "import time\n" + "".join(f"print({line!r}); time.sleep(0.7)\n" for line in told)
    )
    terminal, theirs = pty.openpty()
    command = [sys.executable, "scripts/installing.py", str(tmp_path / "log")]
    with subprocess.Popen(
        [*command, sys.executable, "-u", str(installer)], cwd=REPOSITORY, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how Linux says that the other side is closed
            while data := os.read(terminal, 4096):
                shown += data
    os.close(terminal)
    assert process.returncode == 0
    text = shown.decode()
    assert "\n" not in text and text.endswith("\r\x1b[K"), "one line, and nothing of it stays"
    assert "1 found, now torch-2.13.0 (858.2 MB), 0:0" in text
    assert "now torch-2.13.0 (429 of 858 MB), 0:0" in text
    assert "installing packages, 0 of 3, 0:0" in text
    log = (tmp_path / "log").read_text()
    assert "Collecting torch" in log and "Progress" not in log


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


def test_sglang_gets_an_environment_of_its_own_once_and_the_shell_keeps_its_path(
    project: Path,
) -> None:
    (project / "requirements-sglang.txt").write_text("# nothing\n")
    make_environment(project, ".venv-sglang")
    first = set_up(project, "sglang", then='echo "$PATH"')
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == path_without("uv")
    assert "installing requirements-sglang.txt into .venv-sglang" in first.stderr
    assert not (project / ".venv").exists()
    assert not (project / ".venv-sglang" / "bin" / "agentrl").exists()
    assert set_up(project, "sglang", then="true").stderr == ""
    (project / "requirements-sglang.txt").write_text("# another release\n")
    assert "installing requirements-sglang.txt" in set_up(project, "sglang", then="true").stderr


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
