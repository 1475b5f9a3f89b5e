"""The dashboard and the alerts ask for nothing that the code does not say."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.gateway import gateway_figures
from agentrl.inference.engine import engine_figures
from agentrl.launcher import ledger_figures
from agentrl.launcher.deployment import REPOSITORY
from agentrl.metrics.figure import Counter, Gauge, Histogram
from agentrl.rollout.scheduling import sampler_figures
from agentrl.training.run import trainer_figures

DEPLOY = REPOSITORY / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/agentrl.json"
PAGE = REPOSITORY / "docs/guides/metrics.md"
_MODULES = (sampler_figures, trainer_figures, ledger_figures, gateway_figures, engine_figures)
# Of prometheus_client's collector of processes, and of Prometheus itself.
_OTHERS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "up"}
# How a query names a figure of services: scripts/grafana_dashboard.py says why.
_OF_SERVICE = re.compile(r'\{__name__=~"sglang\[:_\]([a-z_]+)", ')
_NAME = re.compile(r"\b(?:agentrl_|sglang:|process_)[a-z_0-9]+|\bup\b")


def figures() -> dict[str, Gauge | Counter | Histogram]:
    """All figures of all processes, by name."""
    declared = [value for module in _MODULES for value in vars(module).values()]
    declared += trainer_figures.OF_STEP.values()
    found = [each for each in declared if isinstance(each, Gauge | Counter | Histogram)]
    assert len({each.name for each in found}) == len(found) > 60
    return {each.name: each for each in found}


FIGURES = figures()


def samples() -> set[str]:
    """The names that a query may have."""
    names = set(_OTHERS)
    for name, figure in FIGURES.items():
        parts = ("_bucket", "_sum", "_count") if isinstance(figure, Histogram) else ("",)
        names |= {name + part for part in parts}
    return names


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def plain(expression: str) -> str:
    """The expression, with figures of services named as others are."""
    return _OF_SERVICE.sub(r"sglang:\1{", expression)


def expressions() -> dict[str, str]:
    """Those of the dashboard and of the alerts, by where they stand."""
    found = {
        f"{panel['title']} {target['refId']}": plain(target["expr"])
        for panel in panels()
        for target in panel["targets"]
    }
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    return found | {rule["alert"]: rule["expr"] for rule in rules["groups"][0]["rules"]}


@pytest.mark.parametrize(("place", "expression"), expressions().items(), ids=expressions())
def test_an_expression_names_figures_and_labels_that_there_are(place: str, expression: str) -> None:
    names = _NAME.findall(expression)
    assert names and set(names) <= samples(), place
    # Of a selector, those of its own figure; elsewhere, those of any figure in the expression.
    general = {"run", "process", "job", "le"}
    for name, matchers in re.findall(r"([\w:]+)\{([^}]*)\}", expression):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        figure = FIGURES.get(name) or FIGURES.get(base)
        own = set() if figure is None else set(getattr(figure, "labels", ()))
        assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= own | general, (place, name)
    known = {label for each in FIGURES.values() for label in getattr(each, "labels", ())}
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert set(grouped.split(", ")) <= known | general, place


def test_the_dashboard_is_what_its_script_writes() -> None:
    file = REPOSITORY / "scripts/grafana_dashboard.py"
    spec = importlib.util.spec_from_file_location("grafana_dashboard", file)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert DASHBOARD.read_text() == script.text(), "python scripts/grafana_dashboard.py"


def test_legends_name_labels_that_their_expression_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            expression = plain(target["expr"])
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression))))
            if not kept:  # nothing is summed: those of the figure and of its target
                [name] = set(_NAME.findall(expression))
                kept = {"run", "process", *getattr(FIGURES.get(name), "labels", ())}
            assert labels <= kept, (panel["title"], labels, kept)


def test_panels_neither_overlap_nor_leave_the_page() -> None:
    filled: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & filled and max(x for x, _ in cells) < 24, panel["title"]
        filled |= cells


def test_the_example_reads_the_files_that_runs_write() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    [pattern] = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    found = (DEPLOY / "prometheus" / pattern).resolve()
    assert found.parent == REPOSITORY / "output"
    assert Path("demo.metrics_targets.json").match(found.name)


def test_the_guide_has_every_figure() -> None:
    listed = set(re.findall(r"`((?:agentrl_|sglang:)[a-z_0-9]+)`", PAGE.read_text()))
    assert listed == set(FIGURES)
