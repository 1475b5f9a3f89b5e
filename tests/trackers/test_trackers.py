"""Trackers, with the real packages, offline: what is written is read back."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from accelerate import Accelerator
from demo_launch import demo_lines, launch_demo
from tracker_readers import READERS, numbers
from two_segments import FIRST, OF_RECORD, SECOND

import agentrl
from agentrl.cli import main
from agentrl.configs import ConfigError, parse_config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.row_ledger import RowHeader
from agentrl.databases.success import HeldOut
from agentrl.launcher.receiver_checks import check_trackers
from agentrl.training.run.metrics import MetricsWriter
from agentrl.training.run.rollout_table import VIEW_URL, read_rollouts

ALL = list(READERS)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each tracker's own way to keep a run on this machine, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline", "SWANLAB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it reads its variables once


@dataclass(frozen=True)
class Line:
    """The figures of a step."""

    step: int
    loss: float
    grad_norms: dict[str, float]
    entropy: float | None = None
    time: float = 0.0


def writer(output: Path, *flags: str) -> MetricsWriter:
    output.mkdir(exist_ok=True)
    config = parse_config(["--output_dir", str(output), "--run_name", "mine", *flags])
    return MetricsWriter(output, Accelerator(cpu=True), config, 0)


def row(record: str, reward: float) -> RowHeader:
    return RowHeader(record, 0, 11, 5, 1.0, "", reward)


async def stored_run(database: RunDatabase, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two Records, `good` and `bad`."""
    monkeypatch.setenv("DB_URL", url)
    bad = {"record": "bad", "rollout": 2, "score": 0.0, "scores": {}, "final_answer": "| 64\n# no"}
    rows = [
        {**FIRST, **OF_RECORD, "record": "good"}, {**SECOND, **OF_RECORD, "record": "good"},
        {**FIRST, **OF_RECORD, **bad},
    ]  # fmt: skip
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["import", "rows.jsonl", "--run_name", database.name]
    assert await asyncio.to_thread(main, command) == 0


@pytest.mark.parametrize("tracker", ALL)
async def test_flags_figures_and_rollouts_are_read_back(
    tracker: str,
    database: RunDatabase,
    mongod: EmbeddedMongod,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await stored_run(database, mongod.url, monkeypatch)
    metrics = writer(tmp_path / "out", "--report_to", tracker, "--learning_rate", "0.25")
    for step in (1, 2):
        metrics.write(Line(step, 0.5 / step, {"layers.0": 1.5}))
        trackers = metrics.trackers(step)
        assert trackers is not None
        pages = "http://host:8265" if step == 2 else None
        table = await read_rollouts(database, [row("bad", -1.0), row("good", 1.0)], pages)
        trackers.log_rollouts(table, step)
    metrics.close()
    written = READERS[tracker](tmp_path / "out", "mine")
    assert (written.project, written.name) == ("agentrl", "mine")
    assert float(written.flags["learning_rate"]) == 0.25
    assert written.flags["look"] == "agentrl view mine"
    assert sorted(written.figures["loss"]) == [(1, 0.5), (2, 0.25)]
    assert list(numbers(written, "grad_norms/layers.0")) == [1.5, 1.5]
    assert "entropy" not in written.figures
    shown = [(r["step"], r["which"], r["score"], r["task"], r["look"]) for r in written.rows]
    page = f"http://host:8265/run/{database.name}/records"
    assert shown == [
        (1, "best", 1.0, "x", f"agentrl show {database.name} good"),
        (1, "worst", 0.0, "x", f"agentrl show {database.name} bad"),
        (2, "best", 1.0, "x", f"{page}/good"),
        (2, "worst", 0.0, "x", f"{page}/bad"),
    ]
    parts = [
        "[user] how many?", "[assistant] let me look",
        "[call] stock(bin='K7')  ⇒  46 <i>parts</i>", "[assistant] forty-six", "[assistant] e",
    ]  # fmt: skip
    assert written.rows[0]["text"] == "\n\n".join(parts)


def test_evaluations_are_at_the_step_of_their_policy_also_late_and_at_the_end(
    tmp_path: Path,
) -> None:
    metrics = writer(tmp_path / "out", "--report_to", "wandb,tensorboard")
    trackers = metrics.trackers()
    assert trackers is not None
    for step in (1, 2):
        metrics.write(Line(step, 0.5, {}))
        trackers.log_evaluation(HeldOut(step - 1, 4, step, 0.25 * step), step)
    trackers.log_evaluation(HeldOut(2, 4, 3, 0.75), None)
    trackers.log_evaluation(HeldOut(3, 4, 4, 1.0), None)
    metrics.close()
    written = READERS["tensorboard"](tmp_path / "out", "mine")
    assert written.figures["held_out/success"] == [(0, 0.25), (1, 0.5), (2, 0.75), (3, 1.0)]
    written = READERS["wandb"](tmp_path / "out", "mine")
    assert list(numbers(written, "held_out/success")) == [0.25, 0.5, 0.75, 1.0]
    assert list(numbers(written, "held_out/step")) == [0, 1, 2, 3]
    assert written.figures["loss"] == [(1, 0.5), (2, 0.5)]


def test_projects_are_those_of_each_trackers_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB", "SWANLAB", "TRACKIO"):
        monkeypatch.setenv(f"{name}_PROJECT", f"{name.lower()}-agents")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mlflow-agents")
    metrics = writer(tmp_path / "out", "--report_to", "wandb,mlflow,swanlab,trackio")
    metrics.write(Line(1, 0.5, {}))
    metrics.close()
    for tracker in ("wandb", "mlflow", "swanlab", "trackio"):
        assert READERS[tracker](tmp_path / "out", "mine").project == f"{tracker}-agents"


def test_a_tracker_that_fails_gets_nothing_more_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    metrics = writer(tmp_path / "out", "--report_to", "mlflow,tensorboard")
    run = mlflow.active_run()
    assert run is not None
    mlflow.MlflowClient().set_terminated(run.info.run_id)
    mlflow.MlflowClient().delete_run(run.info.run_id)
    for step in (1, 2):
        metrics.write(Line(step, 0.5, {}))
    metrics.close()
    mlflow.MlflowClient().restore_run(run.info.run_id)
    mlflow.end_run()
    assert caplog.text.count("tracker mlflow: ") == 1
    assert "metrics.jsonl has all figures" in caplog.text
    assert len(READERS["tensorboard"](tmp_path / "out", "mine").figures["loss"]) == 2
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("tracker", "variables", "told"),
    [
        ("wandb", {"WANDB_MODE": "online"}, "wandb wants WANDB_API_KEY"),
        ("swanlab", {"SWANLAB_MODE": "online"}, "SwanLab wants SWANLAB_API_KEY"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}, "MLflow wants its server"),
    ],
)  # fmt: skip
def test_a_tracker_without_its_server_or_key_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tracker: str,
    variables: dict[str, str],
    told: str,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody's keys
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=told) as refused:
        writer(tmp_path / "out", "--report_to", tracker)
    assert time.monotonic() - began < 30, "it is not waited for"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ, "later it has its own patience"
    assert f"--report_to {tracker}: {tracker}: " in str(refused.value)
    assert "\n" not in str(refused.value)


KEY = "0123456789" * 4


def netrc(machine: str, login: str = "user") -> str:
    return f"machine {machine}\nlogin {login}\npassword {KEY}\n"


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_a_key_that_is_wanted_and_missing_is_told_before_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    """By the packages' own ways: modes, variables and files."""
    name = tracker.upper()
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody's keys
    monkeypatch.delenv(f"{name}_API_KEY", raising=False)
    monkeypatch.setenv("SWANLAB_PROJECT", "agents")
    config, told = parse_config(["--report_to", tracker]), list[str]()

    for mode in ("offline", "disabled"):
        monkeypatch.setenv(f"{name}_MODE", mode)
        check_trackers(config, told.append)
    monkeypatch.delenv(f"{name}_MODE")  # online
    with pytest.raises(ConfigError, match=f"wants {name}_API_KEY") as refused:
        check_trackers(config, told.append)
    said = f"--report_to {tracker}: {tracker}: it has no key, and would send the run to https://"
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
    assert f"{name}_MODE=offline" in str(refused.value)

    with monkeypatch.context() as given:
        given.setenv(f"{name}_API_KEY", KEY)
        check_trackers(config, told.append)
    host = str(refused.value).partition("https://")[2].partition(";")[0]
    file = {"wandb": Path(".netrc"), "swanlab": Path(".swanlab/.netrc")}[tracker]
    file.parent.mkdir(exist_ok=True)
    file.write_text(netrc(host if tracker == "wandb" else f"https://{host}", f"https://{host}"))
    check_trackers(config, told.append)
    assert told == []
    assert not Path("wandb").exists() and not Path("swanlog").exists(), "nothing is begun"


def test_a_key_that_cannot_be_one_is_refused_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(ConfigError, match=r"wandb: WANDB_API_KEY invalid: .*40\+ characters"):
        check_trackers(parse_config(["--report_to", "wandb"]), print)


@pytest.mark.timeout(400)  # a whole launch
def test_a_run_of_the_demo_reports_to_all_that_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VIEW_URL, "https://pages.example.org/")
    packages = Path(os.environ["TRACKERS_FOLDER"])
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(demo_lines(4)) + "\n")
    flags = ("--max_steps", "2", "--report_to", "all", "--eval_file", str(held_out),
             "--eval_steps", "1", "--eval_rollouts", "1")  # fmt: skip
    done = launch_demo(tmp_path, *flags, python_path=[packages])
    assert done.returncode == 0, done.stdout + done.stderr
    output = tmp_path / "output/demo"
    with agentrl.open_run(output) as run:
        figures = run.metrics().to_pylist()
        scores = {record["id"]: record["score"] for record in run.records().to_pylist()}
        evaluated = run.records(split="eval").to_pandas().groupby("epoch")["score"].mean()
    assert list(evaluated.index) == [0, 1, 2]
    for tracker in ALL:
        written = READERS[tracker](output, "demo")
        assert written.name == "demo", tracker
        assert written.flags["look"] == "https://pages.example.org/run/demo"
        for name in ("loss", "reward_mean", "n_tokens", "mismatch_kl"):
            own = pytest.approx([step[name] for step in figures], rel=1e-6)
            assert list(numbers(written, name)) == own, (tracker, name)
        mean_scores = list(numbers(written, "held_out/score"))
        assert mean_scores == pytest.approx(list(evaluated), rel=1e-6), tracker
        if tracker == "wandb":  # beside the step at which it was known
            assert list(numbers(written, "held_out/step")) == [0, 1, 2]
        else:
            assert [step for step, _ in sorted(written.figures["held_out/score"])] == [0, 1, 2]
        assert {row["step"] for row in written.rows} == {1, 2}
        for shown in written.rows:
            place, _, record = shown["look"].rpartition("/")
            assert place == "https://pages.example.org/run/demo/records"
            assert shown["score"] == scores[record]
            assert "[assistant] " in shown["text"]
