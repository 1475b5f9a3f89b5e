"""What is wrong is said in one sentence, before anything is started or written."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from ports import free_port

from agentrl import cli
from agentrl.configs import ConfigError, parse_config
from agentrl.launcher import evaluate
from agentrl.launcher.deployment import REPOSITORY
from agentrl.launcher.preflight import check_model, check_output
from agentrl.launcher.receiver_checks import check_trace_receiver, check_trackers
from agentrl.launcher.run_folder import (
    LaunchRecord,
    RunLock,
    read_launch,
    steps_finished,
    write_launch,
)
from agentrl.whole_file import write_whole

DEMO_MODEL = REPOSITORY / "assets" / "demo" / "model"


@dataclass(frozen=True)
class Said:
    """How a call of `agentrl` ended and what it printed."""

    status: int
    out: str
    err: str


Launch = Callable[..., Said]


@pytest.fixture
def launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Launch:
    """`agentrl launch grpo ...` in an empty folder that has the demo's assets."""
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    monkeypatch.chdir(tmp_path)

    def launch(*arguments: str, **environment: str) -> Said:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        status = cli.main(["launch", "grpo", *arguments])
        said = capsys.readouterr()
        return Said(status, said.out, said.err)

    return launch


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "assets")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["has no name", "agentrl launch grpo RUN"]),
        (["a run"], ["--run_name 'a run'"]),
        (["demo", "--no_such_flag", "1"], ["--no_such_flag"]),
        (["demo", "--loss_calculator", "TRPO"], ["TRPO", "GRPO"]),
        (["demo", "--loss_calculator", "nowhere.py:loss"], ["nowhere.py", "no such Python file"]),
        (["demo", "--advantage", "nowhere.py:mine"], ["nowhere.py", "no such Python file"]),
        (["demo", "--model_name_or_path", "nowhere"], ["nowhere", "no such folder"]),
        (["demo", "--optim", "adafactor"], ["--optim adafactor", "--param_offload"]),
        (["demo", "--train_file", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["demo", "--mcp_manager_url", "tools.json"], ["tools.json", "neither a http:// URL"]),
        (["demo", "--report_to", "swanlab"], ["--report_to swanlab", "is not installed"]),
        (["demo", "--output_dir", "/proc/agentrl"], ["/proc/agentrl", "--output_dir"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_with_status_two_and_nothing_is_written(
    tmp_path: Path, launch: Launch, arguments: Sequence[str], words: Sequence[str]
) -> None:
    result = launch(*arguments)
    assert result.status == 2, result.err
    assert len(result.err.splitlines()) == 1, result.err
    for word in words:
        assert word in result.err
    assert written(tmp_path) == []


def test_a_server_of_a_tracker_that_is_away_is_told_before_anything_is_started(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "assets-of-pip"
    (packages / "mlflow").mkdir(parents=True)
    (packages / "mlflow" / "__init__.py").touch()  # that it is installed is all that is asked
    monkeypatch.syspath_prepend(packages)
    address = f"http://me:secret@127.0.0.1:{free_port()}"
    result = launch("demo", "--report_to", "mlflow", MLFLOW_TRACKING_URI=address)
    assert result.status == 2 and len(result.err.splitlines()) == 1
    for word in ("--report_to mlflow: mlflow: nobody answers at MLFLOW_TRACKING_URI", "refused"):
        assert word in result.err
    assert "secret" not in result.err
    assert written(tmp_path) == [packages.name]


def test_a_tracker_whose_package_cannot_be_asked_for_its_key_is_said_and_left_to_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("print('hello')")  # of another version
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told: list[str] = []
    check_trackers(parse_config(["--report_to", "wandb"]), told.append)
    [said] = told
    assert said.startswith("--report_to wandb: no package was asked for its key: ModuleNotFound")


def test_a_receiver_of_traces_that_is_away_is_said_and_the_launch_goes_on() -> None:
    said: list[str] = []
    address = f"http://127.0.0.1:{free_port()}"
    check_trace_receiver(parse_config(["--otlp_endpoint", address]), said.append)
    [told] = said
    assert told.startswith(f"--otlp_endpoint {address}: nobody answers there: ")
    assert "refused" in told and told.endswith("traces are dropped until somebody does")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        check_trace_receiver(parse_config(["--otlp_endpoint", here]), said.append)
        server.shutdown()
    assert said == [told]  # any answer will do, as this one of status 501


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"query": "q", "scorer": "math"}', ["have no `answer`", "line 1 (id 1)"]),
        (
            '{"query": "q", "answer": "\\\\frac{1}{", "scorer": "f1 + 0.5*math"}',
            ["tasks.jsonl:1: `answer`", "frac{1}{' is no mathematics, which scorer math compares"],
        ),
        ('{"query": "q", "answer": "a"}', ["uses scorer agentcpm", "--agent_config_path"]),
        ('{"query": "q", "scorer": "ruler"}', ["uses scorer ruler", "`ruler_agent`"]),
        ('{"query": "q", "scorer": {"http": 1}}', ["uses scorer http", "`http_scorer`"]),
        ('{"query": "q", "answer": "a", "scorer": "f1+vibes"}', ["unknown scorer 'vibes'"]),
    ],
)
def test_tasks_that_could_never_be_scored_are_refused(
    tmp_path: Path, launch: Launch, line: str, words: Sequence[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(line)
    result = launch("demo", TRAIN_FILE=str(tasks))
    assert result.status == 2 and len(result.err.splitlines()) == 1
    assert all(word in result.err for word in words)
    assert written(tmp_path) == ["tasks.jsonl"]


def test_a_database_that_could_never_be_is_refused_before_anything_is_told(
    tmp_path: Path, launch: Launch
) -> None:
    result = launch("demo", "--db_connection_string", "mongodb://<YOUR_DB_HOST>:27016/demo")
    assert (result.status, result.out, written(tmp_path)) == (2, "", [])
    assert result.err.endswith(": <YOUR_DB_HOST> is to be filled in\n")


def test_all_bad_task_lines_are_named_at_once(tmp_path: Path, launch: Launch) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"query": "fine", "id": 1}\nnot json\n{"answer": "x"}\n')
    result = launch("demo", TRAIN_FILE=str(tasks))
    assert result.status == 2
    assert f"{tasks}:2:" in result.err and f"{tasks}:3:" in result.err
    assert written(tmp_path) == ["tasks.jsonl"]


def test_all_mistakes_of_both_task_files_are_told_at_once(tmp_path: Path, launch: Launch) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    train.write_text(
        '{"query": "q", "answer": "a", "scorer": "f1+0.1*ruler"}\n'
        '{"query": "q", "anwser": "a", "scorer": "f1"}\n'
        '{"query": "q", "answer": "a", "agent_name": "nobody"}\n'
    )
    held_out.write_text('{"query": "q", "answer": "a", "answer_schema": "xml"}\n')
    result = launch("demo", TRAIN_FILE=str(train), EVAL_FILE=str(held_out))
    assert result.status == 2
    agent, answer, scorer, near, schema = result.err.splitlines()
    assert f"{train}:3: unknown agent_name 'nobody'" in agent
    assert "1 of 2 tasks have no `answer` to score against: line 2 (id 2)" in answer
    assert f"task file {train} uses scorer ruler" in scorer and "--agent_config_path" in scorer
    assert near.startswith(f"{train}:2: is the field `anwser` meant to be `answer`?")
    assert schema.startswith(f"{held_out}:1: unknown answer_schema 'xml'")


def test_what_is_hardly_meant_is_said_and_stops_nothing(tmp_path: Path, launch: Launch) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"query": "q", "answer": "a", "scorer": "f1", "anwser_schema": "boxed"}\n')
    with RunLock(tmp_path / "output" / "demo"):  # the next thing that a launch looks at
        result = launch("demo", TRAIN_FILE=str(tasks))
    assert f"{tasks}:1: is the field `anwser_schema` meant to be `answer_schema`?" in result.out
    assert "live launch" in result.err


def test_a_second_launch_of_a_live_run_is_refused(tmp_path: Path, launch: Launch) -> None:
    with RunLock(tmp_path / "output" / "demo"):
        result = launch("demo")
    assert result.status == 2
    assert f"process {os.getpid()}" in result.err


def test_a_finished_run_says_so_and_what_can_be_done_with_it(
    tmp_path: Path, launch: Launch
) -> None:
    output = tmp_path / "output" / "demo"
    output.mkdir(parents=True)
    (output / "summary.json").write_text(json.dumps({"steps": 60}))
    result = launch("demo", "--max_steps", "60")
    assert result.status == 0, result.err
    assert "is finished" in result.out
    for words in ("show demo", "/eval_example.sh demo", "TRAIN_FILE="):
        assert words in result.out
    assert not (output / "mongo").exists()


def test_the_help_lists_variables_and_flags(launch: Launch) -> None:
    result = launch("--help")
    assert result.status == 0
    assert "NUM_SAMPLERS" in result.out and "--num_generations" in result.out


@pytest.mark.parametrize(
    ("removed", "word"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "chat template"),
    ],
)
def test_a_model_folder_that_lacks_a_part_is_refused_with_its_name(
    tmp_path: Path, removed: str, word: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    assert check_model(str(model)) == model
    (model / removed).unlink()
    with pytest.raises(ConfigError, match=word) as caught:
        check_model(str(model))
    assert str(model) in str(caught.value)


def test_a_chat_template_in_the_tokenizer_s_config_counts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    (model / "chat_template.jinja").unlink()
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{{ 1 }}"}))
    check_model(str(model))


def test_a_disk_with_too_little_room_is_refused_with_both_sizes(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "run", 1)
    assert written(tmp_path) == []
    with pytest.raises(ConfigError, match=r"GiB free and this run needs 1048576\.0 GiB"):
        check_output(tmp_path, 1 << 50)


def test_an_output_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_output(tmp_path / "file" / "run", 1)


def test_a_lock_lasts_until_the_last_process_that_inherited_it_is_gone(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    heir = subprocess.Popen(["sleep", "60"], pass_fds=(lock.fileno(),))
    try:
        lock.release()
        with pytest.raises(ConfigError, match="live launch"):
            RunLock(tmp_path).acquire(patience_s=0.3)
        (tmp_path / "launch.lock").write_text(f"{2**22 + 1}")  # no process can have this number
        with pytest.raises(ConfigError, match="parts of a launch that was killed"):
            RunLock(tmp_path).acquire(patience_s=0.3)
    finally:
        heir.kill()
        heir.wait()
    with RunLock(tmp_path):
        pass


def test_how_a_run_was_launched_is_kept_for_its_owner_only(tmp_path: Path) -> None:
    assert read_launch(tmp_path) is None
    record = LaunchRecord("grpo", ["--mcp_auth_token", "secret"], 12.5)
    write_launch(tmp_path, record)
    assert read_launch(tmp_path) == record
    assert (tmp_path / "launch.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"preset": "grpo"}', "\udcff", '{"flags": 1}'])
@pytest.mark.parametrize("name", ["launch.json", "run.json"])
def test_a_damaged_file_of_a_run_is_one_sentence_that_names_it(
    tmp_path: Path, launch: Launch, capsys: pytest.CaptureFixture[str], text: str, name: str
) -> None:
    folder = tmp_path / "output" / "demo"
    folder.mkdir(parents=True)
    (folder / name).write_text(text, errors="surrogateescape")
    of_launch = [["show", "demo"], ["config", "demo"], ["eval", "demo"]]
    for verb in of_launch if name == "launch.json" else [["launch", "grpo", "demo"]]:
        assert cli.main(verb) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"output/demo/{name} is damaged" in said
        assert "agentrl delete RUN" in said
    assert cli.main(["runs"]) == 0 and "output/demo" in capsys.readouterr().out
    assert cli.main(["delete", "demo", "--keep_database", "--yes"]) == 0
    assert not (folder / name).exists()


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    with pytest.raises(RuntimeError), write_whole(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert written(tmp_path) == []
    assert steps_finished(tmp_path) is None
    with write_whole(path) as partial:
        partial.write_text('{"steps": 3}')
    assert steps_finished(tmp_path) == 3


def test_an_evaluation_is_told_how_many_rollouts_by_its_own_flag() -> None:
    with pytest.raises(ConfigError, match=r"so give --eval_rollouts 1$"):
        evaluate.main(["--model", str(DEMO_MODEL), "--tasks", "t", "--num_generations", "1"])
