"""What the pages say of the program is what the program is: variables, flags, tables, quotations.

The guides' commands are run by `test_guides.py`.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from agentrl.configs import Config, parse_config
from agentrl.configs.familiar import FAMILIAR
from agentrl.launcher.deployment import Deployment
from agentrl.launcher.presets import GRPO, preset_flags
from agentrl.training.model.lora import add_adapter
from agentrl.training.model.memory_model import estimate, longest_line
from agentrl.training.model.memory_report import setup_of, shape_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "training"))

from published_models import MODELS  # noqa: E402

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GIB = 2**30


def table(page: Path, first_heading: str) -> list[list[str]]:
    """The cells below the head of the table whose first column has that heading."""
    lines = page.read_text(encoding="utf-8").splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.startswith(f"| {first_heading} |")]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_variables_is_that_of_the_code() -> None:
    rows = table(DOCS / "guides" / "deployment.md", "variable")
    named = [name for row in rows for name in re.findall(r"`([A-Z_]+)`", row[0])]
    assert sorted(named) == sorted(field.name.upper() for field in fields(Deployment))
    defaults = {row[0].strip("`"): row[1] for row in rows}
    for field in fields(Deployment):
        if field.default is not None and field.type is not bool:
            assert defaults[field.name.upper()] == str(field.default)


def test_the_table_of_the_demos_flags_is_that_of_the_preset() -> None:
    demo = parse_config(preset_flags(GRPO, 1, demo=True))
    own = parse_config(preset_flags(GRPO, 1, demo=False))
    for name, of_demo, of_own in table(DOCS / "guides" / "deployment.md", "flag"):
        for config, said in ((demo, of_demo), (own, of_own)):
            value = _value(config, name.strip("`-"))
            first = said.partition(":")[0]
            if value is None:
                assert first in ("as `--max_tokens`", "none")
            elif isinstance(value, bool):
                assert first == str(value).lower(), name
            else:
                assert float(first) == value, name


def _value(config: Config, flag: str) -> object:
    (found,) = [
        getattr(group, flag)
        for group in (getattr(config, field.name) for field in fields(Config))
        if hasattr(group, flag)
    ]
    return found


@cache
def _empty(name: str, lora: str) -> torch.nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name])
    if lora:
        add_adapter(model, parse_config(lora.split()).lora, frozen_dtype=torch.float32)
    return model


def _hardware() -> list[object]:
    """The rows of the first table, one with an adapter for all of them in the fast suite: making
    an adapter for a large model takes seconds."""
    rows = table(DOCS / "start" / "hardware.md", "model | GPUs × GiB")
    slow = [row for row in rows if "lora" in row[2]][1:]
    return [
        pytest.param(row, id=" ".join(row[:3]), marks=[pytest.mark.slow] if row in slow else [])
        for row in rows
    ]


@pytest.mark.parametrize("row", _hardware())
def test_the_table_of_hardware_is_what_the_memory_model_says(row: list[str]) -> None:
    name, gpus, flags, *said = row
    count, gib = gpus.split(" × ")
    flags = flags.strip("`")
    config = parse_config(
        ["--bf16", "--gradient_checkpointing", "--micro_batch_tokens", "16384", *flags.split()]
    )
    shape = shape_of(_empty(name, flags if "lora" in flags else ""))  # type: ignore[arg-type]
    setup = setup_of(config, int(count))
    found = estimate(shape, setup)
    longest = longest_line(shape, setup, int(0.85 * int(gib) * GIB)) // 1000 * 1000
    assert said == [f"{found.states / GIB:.1f}", f"{found.peak / GIB:.1f}", f"{longest:,}"]
    assert longest >= 16384


@pytest.mark.slow  # it plans some fifty launches
def test_the_table_of_placements_is_what_the_planner_says() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from placement_page import PAGE, rewritten
    finally:
        sys.path.pop(0)
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "run `python scripts/placement_page.py`"


@pytest.mark.parametrize(
    "row", table(DOCS / "start" / "hardware.md", "model | weights, GiB"), ids=str
)
def test_the_table_of_services_is_counted_from_the_model(row: list[str]) -> None:
    shape = shape_of(_empty(row[0], ""))  # type: ignore[arg-type]
    cache_of_1000 = 1000 * 2 * 2 * shape.layers * shape.key  # keys and values, two bytes each
    assert row[1:] == [f"{2 * shape.parameters / GIB:.1f}", f"{cache_of_1000 / 2**20:.0f}"]


def test_the_arguments_and_variables_of_the_sandbox_are_all_described() -> None:
    server = ROOT / "deploy" / "sandbox" / "server.py"
    shown = subprocess.run(
        [sys.executable, str(server), "--help"], text=True, capture_output=True, check=True
    ).stdout
    text = (DOCS / "guides" / "sandbox.md").read_text(encoding="utf-8")
    for flag in set(re.findall(r"--([a-z_]+)", shown)) - {"help"}:
        assert re.search(rf"^\| `(--)?{flag}\b", text, re.MULTILINE), f"--{flag} is not described"
    compose = (ROOT / "deploy" / "sandbox" / "compose.yml").read_text(encoding="utf-8")
    for name, default in re.findall(r"\$\{([A-Z_]+):?-?([^}?]*)\}", compose):
        (row,) = re.findall(rf"^\| `{name}` \| (.*?) \|", text, re.MULTILINE)
        assert default in row


# Of docker, hf, systemctl and SGLang.
_OF_OTHERS = {"build", "incremental-streaming-output", "local-dir", "max-total-tokens", "now"}


def test_every_flag_that_a_page_names_is_one() -> None:
    ours = {flag.name for group in fields(Config) for flag in fields(group.type)}  # type: ignore[arg-type]
    folders = [ROOT / name for name in ("src", "deploy", "tests", "benchmarks", "scripts")]
    files = [file for folder in folders for file in folder.rglob("*")]
    source = "\n".join(
        file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".sh", ".yml")
    )
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in set(re.findall(r"(?<![\w-])--([a-z][a-z_0-9-]+\b)(?!\*)", text)):
            known = name in {*ours, *FAMILIAR, *_OF_OTHERS} or f"--{name}" in source
            assert known or f'flag("{name}' in source, f"{page.name}: there is no --{name}"


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        if page.parent.name != "design":
            assert f"({page.relative_to(ROOT)}" in readme, f"the README does not name {page}"


def test_the_site_has_the_groups_and_pages_of_the_readme() -> None:
    """`nav` of mkdocs.yml against the README's sections below `## Documentation`. A page of the
    site stands in the group of the README that has its link; all pages of docs/ are in `nav`."""
    _, _, documentation = (ROOT / "README.md").read_text("utf-8").partition("## Documentation")
    sections = re.split(r"^### (\w+)$", documentation, flags=re.MULTILINE)[1:]
    linked = {
        title: set(re.findall(r"\(docs/([\w./-]+\.md)", text))
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    groups = {title: set(_leaves(pages)) for entry in nav for title, pages in entry.items()}
    assert groups.pop("Home") == {"index.md"}
    assert list(groups) == list(linked) == ["Start", "Guides", "Reference", "Internals"]
    for title, pages in groups.items():
        for page in pages:
            assert page in linked[title] or page.startswith("design/2"), f"{title}: {page}"
    everywhere = {page for pages in groups.values() for page in pages} | {"index.md"}
    assert everywhere == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def _leaves(nav: object) -> Iterator[str]:
    match nav:
        case str():
            yield nav
        case dict():
            yield from (leaf for value in nav.values() for leaf in _leaves(value))
        case list():
            yield from (leaf for value in nav for leaf in _leaves(value))


def test_every_page_that_the_code_names_exists() -> None:
    folders = [ROOT / name for name in ("src", "assets", "benchmarks", "deploy", "scripts")]
    files = [*ROOT.glob("*.*"), *(file for folder in folders for file in folder.rglob("*.*"))]
    for file in files:
        if file.suffix in (".py", ".sh", ".yml", ".md", ".toml", ".txt"):
            for page in re.findall(r"\bdocs/[\w./-]+\.md\b", file.read_text(encoding="utf-8")):
                assert (ROOT / page).is_file(), f"{file.relative_to(ROOT)} names {page}"


def _texts(file: Path) -> Iterator[str]:
    """All strings of a source file, what is filled in as `…`."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".sh":
        yield re.sub(r'"?\s*\\\n\s*"?', " ", re.sub(r"\$\{?\w+\}?|\$\([^)]*\)", "…", source))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def _all_texts() -> list[str]:
    folders = [ROOT / "src", ROOT / "deploy", ROOT / "scripts"]
    files = [file for folder in folders for file in folder.rglob("*")]
    return [text for file in files if file.suffix in (".py", ".sh") for text in _texts(file)]


def _quotations() -> list[str]:
    """What the page of troubleshooting quotes: sentences in code spans of a first cell."""
    text = (DOCS / "start" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \| .*?\| .*\|$", text, re.MULTILINE)
    spans = [span for cell in cells for span in re.findall(r"`` (.+?) ``|`([^`]+)`", cell)]
    return [quoted for pair in spans for quoted in pair if len(quoted.split()) > 2]


@pytest.mark.parametrize("quoted", _quotations())
def test_a_quoted_message_is_one_that_the_program_prints(quoted: str) -> None:
    parts = [part.strip() for part in quoted.split("…")]
    pattern = re.compile(".*".join(re.escape(part) for part in parts if part), re.DOTALL)
    assert any(pattern.search(text) for text in _all_texts())


def test_enough_messages_are_quoted() -> None:
    assert len(_quotations()) > 30
