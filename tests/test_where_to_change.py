"""CONTRIBUTING.md says which files a change touches, and each change is made here in those files.

A row of its table "Where to change what" is a kind of change. `CHANGES` makes it in a copy of the
sources: the paths come from the table, so a file that moves needs its new path there and nothing
here. Then the pages that are made from the code are written (`PAGES` says what changes there), and
a program that imports the copy uses the new thing.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml")
ROW = re.compile(r"^\| (an? [\w -]+) \| (`.+?`) \| .+ \|$", re.MULTILINE)


def the_table() -> dict[str, list[str]]:
    """The files of each kind of change, in the order of its row."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Where to change what")[2].partition("\n## ")[0]
    return {kind: re.findall(r"`([^`]+)`", files) for kind, files in ROW.findall(section)}


TABLE = the_table()


@dataclass(frozen=True)
class Copy:
    """A copy of the repository in which one change is made, in the files of its row."""

    root: Path
    paths: list[str]
    name: str = "newcomer"

    def file(self, place: int) -> Path:
        """The row's file at a place of its list."""
        return self.root / self.paths[place].replace("NAME", self.name)

    def package(self, place: int) -> str:
        """The package that holds the file at a place."""
        return ".".join(Path(self.paths[place]).parent.parts[1:])

    def write(self, place: int, text: str) -> None:
        """A new file."""
        assert not self.file(place).exists()
        self.file(place).write_text(text, encoding="utf-8")

    def insert(self, place: int, after: str, text: str) -> None:
        """New lines behind some that stand in the file once."""
        source = self.file(place).read_text(encoding="utf-8")
        assert source.count(after) == 1, f"{self.paths[place]} has not once: {after}"
        self.file(place).write_text(source.replace(after, after + text), encoding="utf-8")

    def changed(self) -> set[str]:
        """The files that differ from the repository's."""
        files = [file for file in self.root.rglob("*") if file.is_file()]
        paths = [file.relative_to(self.root) for file in files if "__pycache__" not in file.parts]
        return {path.as_posix() for path in paths if self._differs(path)}

    def _differs(self, path: Path) -> bool:
        original = ROOT / path
        return not original.is_file() or original.read_bytes() != (self.root / path).read_bytes()

    def run(self, *arguments: str) -> str:
        """What Python prints, with the copy in place of the installed package."""
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root / "src")},
            text=True,
            capture_output=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


def of_guide(guide: str, file: str) -> str:
    """A file that a guide has its reader write."""
    text = (ROOT / "docs" / "guides" / guide).read_text(encoding="utf-8")
    (code,) = re.findall(rf'^```python title="{file}"\n(.*?)^```$', text, re.M | re.S)
    return str(code)


def add_scorer(copy: Copy) -> str:
    copy.write(0, of_guide("write-a-scorer.md", "scorers.py"))
    return """
from agentrl.configs import parse_config
from agentrl.configs.user_module import load_user_module
from agentrl.rollout.scorers import known_scorers
load_user_module(parse_config(["--scorer_module", "newcomer.py"]).reward.scorer_module, "...")
assert {"close", "brief"} <= known_scorers()
"""


def add_agent(copy: Copy) -> str:
    copy.write(0, of_guide("write-an-agent.md", "agents.py"))
    return """
from agentrl import AsyncSampler
from agentrl.configs import parse_config
from agentrl.rollout.agents.agent_registry import find_agent, load_agents
load_agents(parse_config(["--agent_module", "newcomer.py", "--agent_name", "counting"]))
assert issubclass(find_agent("counting"), AsyncSampler)
"""


def add_loss(copy: Copy) -> str:
    copy.write(
        0,
        f'''
import torch
from agentrl.configs import LossConfig
from {copy.package(0)}.inputs import LossInputs, TokenLoss

def newcomer(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """L = -A log pi"""
    never = torch.zeros_like(inputs.mask)
    ratio = torch.ones_like(inputs.logprobs)
    return TokenLoss(-inputs.advantages * inputs.logprobs, ratio, never, never)
''',
    )
    line = '    "NEW": LossDefaults("newcomer.newcomer", advantage="mean", epsilon=0.5),\n'
    copy.insert(1, "LOSSES: Mapping[str, LossDefaults] = {\n", line)
    return """
from agentrl.configs import parse_config
from agentrl.training.losses import loss_function
config = parse_config(["--loss_calculator", "NEW"])
assert (config.loss.clip_range[0], config.reward.estimator) == (0.5, "mean")
assert loss_function(config.loss).__name__ == "newcomer"
"""


def add_flag(copy: Copy) -> str:
    copy.insert(
        0,
        "    min_turns: int = flag(\n        0,\n"
        '        "number of turns that a right trajectory must exceed to be trained",\n'
        "        least=0,\n    )\n",
        '    last_turn: int = flag(9, "largest number of turns that is trained", least=1)\n',
    )
    copy.insert(
        1,
        "    rules: dict[str, Callable[[Kept], list[int]]] = {}\n",
        '    rules["last_turn"] = lambda kept: [\n'
        "        i for i in kept if records[i].n_turns <= config.last_turn\n    ]\n",
    )
    return """
from agentrl.configs import ConfigError, parse_config
from agentrl.databases.documents import Record
from agentrl.rollout.groups.group_rules import apply_group_rules
config = parse_config(["--last_turn", "2", "--drop_zero_advantage", "false"])
records = [
    Record(_id=f"r{n}", task="t", task_id="t", rollout=n, attempt=0, split="train", epoch=0,
           owner="o", query="?", score=1.0, n_turns=n)
    for n in (2, 3)
]
outcomes = apply_group_rules("t", records, config.reward)
assert [outcome.left_out for outcome in outcomes] == [None, "last_turn"]
try:
    parse_config(["--last_turn", "0"])
except ConfigError as error:
    assert "at least 1" in str(error)
else:
    raise AssertionError("the bound does not hold")
"""


def add_field(copy: Copy) -> str:
    copy.insert(
        0,
        "    n_continuations: int = 0  # prompts that follow a generated turn\n",
        "    n_lines: int = 0\n",
    )
    copy.insert(
        1,
        "        self.record.n_continuations = self.context.n_continuations\n",
        "        self.record.n_lines = 7\n",
    )
    test = copy.root / "tests" / "rollout" / "test_newcomer.py"
    test.write_text("""
import time

from scripted_service import END


async def test_the_field_is_stored(talk, database) -> None:
    async with talk(f"<answer>42</answer>{END}") as (sampler, resources):
        begun = sampler.record.model_copy()
        record = await sampler.run()
        await resources.records.start([begun], time.monotonic())
        await resources.records.sampled(record)
        await resources.records.finish(record.model_copy(update={"status": "scored"}))
    stored = await database.records.find_one({"_id": record.id})
    assert stored["n_lines"] == 7
""")
    copy.run(*PYTEST, str(test))
    test.unlink()
    return "from agentrl.databases.documents import Record; Record.model_fields['n_lines']"


def add_column(copy: Copy) -> str:
    line = '    "turn": Column(INT32, -1, "turn", optional=True),\n'
    copy.insert(0, "COLUMNS: dict[str, Column] = {\n", line)
    copy.insert(
        1, '{"mask": 1, "logprobs": logprobs, "versions": of_each, ', '"turn": tokens.turn, '
    )
    copy.insert(
        2,
        "    entropy: Tensor | None = None  # float32, of the policy at the token\n",
        "    turn: Tensor | None = None  # int64\n",
    )
    copy.insert(
        2, '            staleness=columns["staleness"],\n', '            turn=columns["turn"],\n'
    )
    return """
import torch
from agentrl.databases.token_tree import TokenTree
from agentrl.policy_version import VersionSpan
from agentrl.rollout.chat.tokens import TokenContext
from agentrl.training.data.batch import collate_forest
from agentrl.training.data.sequences import TrainingSequence
context = TokenContext()
for turn, prompt in enumerate([[1, 2], [3]]):
    context.observe(prompt) if turn else context.begin_segment(prompt)
    context.add_turn([8, 9], [-0.5, -0.5], [VersionSpan(version=0, start=0, end=2)])
stored = TokenTree.unpack(context.tree().pack())
batch = collate_forest([TrainingSequence(stored, temperature=1.0, row_tokens=4)], [0])
inputs = batch.loss_inputs(torch.zeros(len(batch.targets)), None)
assert inputs.turn.tolist() == [0, 0, 1, 1]
older = context.tree().pack()
del older["turn"]
assert set(TokenTree.unpack(older)["turn"]) == {-1}
"""


def add_engine(copy: Copy) -> str:
    """The engine of `tests/counting_engine.py`, where engines are."""
    test = ast.parse((ROOT / "tests" / "counting_engine.py").read_text("utf-8"))
    (engine,) = [part for part in test.body if getattr(part, "name", "") == "CountingEngine"]
    used = {node.id for node in ast.walk(engine) if isinstance(node, ast.Name)}
    imports = [
        f"from {part.module} import {alias.name}"
        for part in test.body
        if isinstance(part, ast.ImportFrom)
        for alias in part.names
        if alias.name in used
    ]
    copy.write(0, "\n".join([*imports, ast.unparse(engine)]))
    package = copy.package(0)
    copy.insert(
        1,
        f"from {package}.client import SGLangClient\n",
        f"from {package}.newcomer import CountingEngine\n",
    )
    copy.insert(1, '= {"sglang": SGLangClient', ', "newcomer": CountingEngine')
    return f"""
import asyncio
from {package}.pool import ServicePool
from {package}.protocol import GenerateRequest, SamplingParams

async def main():
    async with ServicePool() as pool:
        pool.update(["newcomer+http://127.0.0.1:1"])
        await pool.wait_ready(1)
        request = GenerateRequest("r", (1, 2, 3), SamplingParams(4))
        made = await pool.generate(request, record_id="r")
        assert tuple(made.output_ids) == (4, 5, 6, 7)

asyncio.run(main())
"""


def add_parser(copy: Copy) -> str:
    package = copy.package(0)
    copy.write(
        0,
        f"from {package}.calls import ParsedCall, ParsedTurn, Tools\n"
        "def parse_newcomer(text: str, tools: Tools = ()) -> ParsedTurn:\n"
        "    return ParsedTurn('', (ParsedCall(text.removeprefix('CALL '), {}),))\n",
    )
    copy.insert(
        1,
        f"from {package}.calls import ToolCallParser\n",
        f"from {package}.newcomer import parse_newcomer\n",
    )
    line = '    "newcomer": parse_newcomer,\n'
    copy.insert(1, "PARSERS: Mapping[str, ToolCallParser] = {\n", line)
    copy.insert(2, "TOOL_CALL_PARSERS = (\n", '    "newcomer",\n')
    return f"""
from agentrl.configs import parse_config
from {package} import tool_call_parser
name = parse_config(["--tool_call_parser", "newcomer"]).agent.tool_call_parser
(call,) = tool_call_parser(name)("CALL stock").calls
assert call.name == "stock"
"""


# Of each kind: how many files it may touch, and the change itself, which returns a program that
# uses the new thing.
CHANGES: dict[str, tuple[int, Callable[[Copy], str]]] = {
    "a scorer": (1, add_scorer),
    "an agent": (1, add_agent),
    "a loss": (2, add_loss),
    "a flag": (2, add_flag),
    "a stored field": (2, add_field),
    "a per-token column": (3, add_column),
    "an engine": (2, add_engine),
    "a parser of tool calls": (3, add_parser),
}

FLAGS_PAGE, CLASSES_PAGE = "docs/reference/flags.md", "docs/guides/checkpoints.md"
# What changes in the pages that `scripts/flags_page.py` writes: the page, and a text of it.
PAGES: dict[str, dict[str, str]] = {
    "a loss": {FLAGS_PAGE: "; one of NEW, "},
    "a flag": {FLAGS_PAGE: "| `--last_turn` N | `9` |", CLASSES_PAGE: " `--last_turn` "},
    "a parser of tool calls": {FLAGS_PAGE: "; one of newcomer, "},
}
PAGE_TESTS = (
    "tests/test_flags.py::test_the_page_of_flags_is_as_the_code_has_them",
    "tests/test_run_flags.py::test_the_docs_name_every_flag_in_the_row_of_its_class",
)


def test_the_table_has_all_kinds_of_changes() -> None:
    assert list(TABLE) == list(CHANGES)


# Each runs a program of seconds on the copy, the stored field a sampler on a mongod.
_SLOW = {
    "a stored field", "a per-token column", "a loss", "a flag", "a parser of tool calls",
}  # fmt: skip


@pytest.mark.timeout(320)  # a stored field is shown by a run
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] if kind in _SLOW else []) for kind in CHANGES],
)
def test_a_change_touches_the_files_of_its_row_and_no_others(kind: str, tmp_path: Path) -> None:
    most, change = CHANGES[kind]
    copy = Copy(tmp_path, TABLE[kind])
    assert len(copy.paths) <= most
    for folder in ("src", "scripts", "docs", "tests", "assets/demo"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    program = change(copy)

    files = {path.replace("NAME", copy.name) for path in copy.paths}
    assert copy.changed() == files
    copy.run("scripts/flags_page.py")
    pages = PAGES.get(kind, {})
    assert copy.changed() == files | pages.keys()
    for page, text in pages.items():
        assert text in (copy.root / page).read_text(encoding="utf-8")
    if pages:
        copy.run(*PYTEST, *PAGE_TESTS)
    copy.run("-c", f"import agentrl\nassert agentrl.__file__.startswith({str(tmp_path)!r})")
    copy.run("-c", program)
