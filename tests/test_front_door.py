"""What a user's own file imports comes from `agentrl` itself, quickly and without torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "pymongo", "numpy", "pydantic")


def in_a_fresh_process(program: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return ended.stdout


def test_importing_the_package_is_quick_and_loads_nothing_heavy() -> None:
    program = (
        "import sys, time\nbegan = time.process_time()\nimport agentrl\n"
        "took = time.process_time() - began\n"
        f"print(took, [name for name in {HEAVY} if name in sys.modules])"
    )
    runs = [in_a_fresh_process(program).split(maxsplit=1) for _ in range(3)]
    assert {loaded.strip() for _, loaded in runs} == {"[]"}
    assert min(float(took) for took, _ in runs) < 0.3


@pytest.mark.parametrize("name", agentrl.__all__)
def test_every_name_is_what_it_says(name: str) -> None:
    found = getattr(agentrl, name)
    assert found is getattr(agentrl, name)
    if name != "__version__":
        assert found.__name__ == name
        assert getattr(sys.modules[found.__module__], name) is found


def test_a_name_of_a_scorer_needs_no_torch() -> None:
    program = (
        "import sys\nfrom agentrl import Score, register_scorer, register_agent, unpack_ints\n"
        "print('torch' in sys.modules)"
    )
    assert in_a_fresh_process(program) == "False\n"


def test_a_launch_looks_agents_up_without_the_libraries_that_run_them() -> None:
    program = (
        "import sys, agentrl.launcher.run\nfrom agentrl.rollout.agents import find_agent\n"
        "find_agent('mcp')\n"
        "print([name for name in ('torch', 'transformers', 'mcp') if name in sys.modules])"
    )
    assert in_a_fresh_process(program) == "[]\n"


def test_a_name_that_is_not_there_is_an_error_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'agentrl' has no attribute 'Scores'"):
        agentrl.Scores  # noqa: B018
    assert dir(agentrl) == sorted(agentrl.__all__)


def test_type_checkers_see_the_names_that_are_there_when_it_runs() -> None:
    tree = ast.parse(Path(agentrl.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == agentrl._HOME_OF
    assert sorted([*seen, "__version__"]) == sorted(agentrl.__all__)


def test_pages_and_assets_import_from_the_front_door_only() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "assets").rglob("*.py")]
    inner = re.compile(r"\b(?:from|import) agentrl\.[\w.]+")
    named = re.compile(r"\bfrom agentrl import \(?([\w, \n]+)")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not inner.findall(text), f"{page}: import it from agentrl itself"
        for names in named.findall(text):
            first = names.strip().splitlines()[0]
            given = {name.strip() for name in first.split(",") if name.strip()}
            assert given <= set(agentrl.__all__), f"{page}: {given - set(agentrl.__all__)}"


def test_the_package_itself_does_not_come_in_by_the_front_door() -> None:
    for file in (ROOT / "src" / "agentrl").rglob("*.py"):
        names = re.findall(r"^from agentrl import (.*)", file.read_text("utf-8"), re.MULTILINE)
        assert set(names) <= {"__version__"}, f"{file} imports {names}"
