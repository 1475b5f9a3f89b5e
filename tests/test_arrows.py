"""Imports between packages go in one direction, that of docs/architecture.md."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import agentrl

SOURCE = Path(agentrl.__file__).parent
MAY_IMPORT = {
    "configs": {"original_names"},
    "metrics": {"configs"},
    "mathematics": set(),
    "databases": {"configs"},
    "inference": {"configs", "databases", "metrics"},
    "rollout": {"configs", "databases", "inference", "mathematics", "metrics"},
    "gateway": {"configs", "databases", "inference", "metrics", "rollout"},
    "training": {"configs", "databases", "inference", "metrics"},
    "launcher": {
        "configs", "databases", "gateway", "inference", "metrics", "rollout", "training",
    },
    "viewer": {"configs", "databases", "launcher", "rollout"},
    "original_names": {"configs", "databases", "rollout"},
}  # fmt: skip


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_packages_import_each_other_in_one_direction() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert packages == set(MAY_IMPORT)
    found: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        for file in (SOURCE / package).rglob("*.py"):
            parts = [name.split(".") for name in imported(file)]
            found[package] |= {each[1] for each in parts if each[0] == "agentrl" and each[1:]}
    against = {
        package: wrong
        for package, names in found.items()
        if (wrong := (names & packages) - MAY_IMPORT[package] - {package})
    }
    assert not against
