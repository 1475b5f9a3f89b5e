"""Rules, dashboard and a live run, seen by the real Prometheus."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from ports import free_port

from agentrl.launcher.deployment import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DEPLOY = REPOSITORY / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/agentrl.json"
STEPS = 4  # that were seen one after the other
# Panels of what does not happen in the demo.
EMPTY = {
    "Entropy and KL to the reference",  # without --log_entropy and --beta
    "Open breakers",
    "Failed attempts of this launch",
    "Sessions and waiting clients",
    "Requests per second",
}


@dataclass(frozen=True)
class Prometheus:
    """A real one, by its HTTP API."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(query)}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float:
        """The only value of an expression now; 0 if there is none."""
        found = self.ask(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0

    def up(self) -> dict[str, str]:
        """The health of each target by its process."""
        targets = self.get("targets", state="active")["activeTargets"]
        return {target["labels"]["process"]: target["health"] for target in targets}


def until(condition: Callable[[], bool], what: str, timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.3)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """It reads the example's configuration, every second, for runs in the test's folder."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    place = tmp_path / "deploy/prometheus"
    place.mkdir(parents=True)
    (place / "prometheus.yml").write_text(yaml.safe_dump(config))
    (place / "alerts.yml").symlink_to(DEPLOY / "prometheus/alerts.yml")
    (tmp_path / "output").mkdir()  # what is there is watched, else looked for every 30 s
    url = f"127.0.0.1:{free_port()}"
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={place / 'prometheus.yml'}",
             f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address={url}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until(lambda: _is_ready(url), f"Prometheus is ready, see {tmp_path}", 30)
        yield Prometheus(f"http://{url}")
    finally:
        process.terminate()
        process.wait(timeout=30)


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"http://{url}/-/ready", timeout=10):
            return True
    except URLError:
        return False


@pytest.fixture
def launch(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """The demo, which trains until the test stops it."""
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", "launch", "grpo", "demo", "--eval_steps", "0",
         "--per_device_train_batch_size", "4", "--max_steps", "10000",
         "--metrics_port", str(free_port())],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def checked(*command: str) -> str:
    done = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_finds_no_fault_in_rules_and_example_and_the_rules_fire_when_they_should() -> None:
    assert "8 rules found" in checked("promtool", "check", "rules", "alerts.yml")
    checked("promtool", "check", "config", "prometheus.yml")
    assert "SUCCESS" in checked("promtool", "test", "rules", "alerts_test.yml")


def test_grafanas_own_types_know_every_field_of_the_dashboard() -> None:
    types = Path(__file__).with_name("dashboard_types.py")
    done = checked(os.environ["GRAFANA_TYPES"], str(types), str(DASHBOARD))
    assert json.loads(done) == []


def test_a_live_run_is_found_and_read_and_fills_the_dashboard(
    prometheus: Prometheus, launch: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    # Of a counter that was read once, nothing is known.
    until(lambda: prometheus.value("changes(agentrl_step[5m])") >= STEPS, f"{STEPS} steps")
    until(lambda: set(prometheus.up().values()) == {"up"}, "all targets are read")
    assert {"ledger", "service-0", "sampler-0", "trainer"} <= set(prometheus.up())

    _fills_the_dashboard(prometheus)
    _says_what_the_run_says(prometheus, tmp_path / "output/demo")
    figures = prometheus.get("label/__name__/values")
    for process in ("agentrl_ledger", "agentrl_step", "agentrl_turns", "sglang"):
        assert any(name.startswith(process) for name in figures)
    firing = prometheus.ask('ALERTS{alertstate="firing"}')
    assert firing == []

    launch.send_signal(signal.SIGTERM)
    output, _ = launch.communicate(timeout=60)
    assert launch.returncode != 0 and "checkpoint" in output
    assert not (tmp_path / "output/demo.metrics_targets.json").exists()
    until(lambda: prometheus.up() == {}, "no target is left", 20)


def _fills_the_dashboard(prometheus: Prometheus) -> None:
    """Each query is one that Prometheus parses, and had data, unless the demo has none."""
    runs = prometheus.get("label/run/values", **{"match[]": "agentrl_ledger_up"})
    assert runs == ["demo"]  # what the variable of the dashboard asks for
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$run", "demo").replace("$__rate_interval", "10s")
            prometheus.get("format_query", query=expression)
            found = prometheus.ask(f"last_over_time(({expression})[2m:1s])")
            assert bool(found) != (panel["title"] in EMPTY), (panel["title"], expression)


def _says_what_the_run_says(prometheus: Prometheus, output: Path) -> None:
    """The trainer's sums at each moment are those of the lines of `metrics.jsonl` so far."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    read = {
        name: dict(prometheus.ask(f"{name}[2m]")[0]["values"])
        for name in ("agentrl_step", "agentrl_trained_tokens_total", "agentrl_trained_rows_total")
    }
    moments = set.intersection(*(set(values) for values in read.values()))
    seen = {int(read["agentrl_step"][moment]) for moment in moments}
    assert len(seen) >= 3
    for moment in moments:
        step = int(read["agentrl_step"][moment])
        so_far = [line for line in lines if line["step"] <= step]
        if len(so_far) < step:
            continue  # the file was read before it
        tokens = sum(line["n_train_tokens"] for line in so_far)
        assert int(read["agentrl_trained_tokens_total"][moment]) == tokens
        rows = sum(line["n_rows"] for line in so_far)
        assert int(read["agentrl_trained_rows_total"][moment]) == rows
