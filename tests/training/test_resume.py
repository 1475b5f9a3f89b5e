"""Flags, data and folders that are others than a run began with, on a real mongod."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tiny import linear_rows, sequences_of, tiny_model, write_tiny_folder
from trainer_run import Run

from agentrl.configs import ComputeConfig, LearnerConfig, OptimizerConfig
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, RowStatus, Split, group_order
from agentrl.databases.feeder import TaskFeeder
from agentrl.databases.runs import load_run, reopen
from agentrl.databases.success import evaluations
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.training.parallel import make_mesh
from agentrl.training.step.learner import Learner
from agentrl.training.trainer import main


def learner(optimizer: OptimizerConfig, steps: int) -> Learner:
    return Learner(
        tiny_model(),
        make_mesh(Accelerator(cpu=True)),
        LearnerConfig(ComputeConfig(micro_batch_tokens=4096), optimizer=optimizer),
        steps,
    )


def test_a_loaded_learner_has_the_moments_of_the_checkpoint_and_settings_of_its_own() -> None:
    rows = [sequences_of(row) for row in linear_rows(4)]
    before = learner(OptimizerConfig(learning_rate=1e-3, weight_decay=0.5), 10)
    for _ in range(3):
        before.step(rows)
    given = OptimizerConfig(
        learning_rate=8e-5, weight_decay=0.25, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6,
        lr_scheduler_type="linear", warmup_steps=2,
    )  # fmt: skip
    after = learner(given, 10)
    after.load_state_dict(torch.utils._pytree.tree_map(_copy, before.state_dict()))

    matrices, others = after.optimizer.param_groups
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.25, 0.0)
    for group in (matrices, others):
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
        # three of the ten steps are done: five of eight are left of the way down, once warm
        assert group["lr"] == pytest.approx(8e-5 * 7 / 8)
    moments = [
        list(trained.optimizer.state_dict()["state"].values()) for trained in (before, after)
    ]
    for one, other in zip(*moments, strict=True):
        assert one["step"] == other["step"] == 3
        assert torch.equal(one["exp_avg"].full_tensor(), other["exp_avg"].full_tensor())
    statistics = after.step(rows)
    assert statistics.learning_rate == pytest.approx(8e-5 * 7 / 8)
    assert after.scheduler.get_last_lr()[0] == pytest.approx(8e-5 * 6 / 8)


def _copy(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def test_a_resume_trains_with_the_flags_given_now_and_says_which_are_others(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.add(linear_rows(16))
    flags = run.flags("--enable_sampling", "false", "--max_steps")
    assert main([*flags, "2"]) == 0
    with caplog.at_level("INFO"):
        assert main([*flags, "4", "--learning_rate", "1e-4", "--request_timeout", "9"]) == 0
    assert [line["learning_rate"] for line in run.metrics()] == [1e-3, 1e-3, 1e-4, 1e-4]
    said = [message for message in caplog.messages if "→" in message]
    assert said == [
        "--learning_rate 1e-3 → 1e-4 (since step 2)",
        "--max_steps 2 → 4 (since step 2)",
    ]
    document = run.database(load_run)
    assert document is not None and document.flags is not None
    assert document.flags["learning_rate"] == 1e-4
    assert not {"mcp_auth_token", "db_connection_string"} & document.flags.keys()


def test_a_resume_removes_what_a_crash_left_of_publications_and_nothing_else(run: Run) -> None:
    run.add(linear_rows(16))
    flags = run.flags("--enable_sampling", "false", "--max_steps")
    assert main([*flags, "1"]) == 0
    weights = run.output / "weights"
    remains, of_others = {"v7.partial", "probe-0123abcd"}, {"probe-of-mine.txt", "mine.partial"}
    for name in remains | of_others:
        (weights / name).mkdir()
        (weights / name / "model.safetensors").touch()
    assert main([*flags, "2"]) == 0
    left = {folder.name for folder in weights.iterdir()}
    assert of_others < left and not remains & left


def test_another_task_file_is_refused_or_taken_and_then_nothing_old_is_trained(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = linear_rows(16)
    run.add(rows[:8])
    flags = run.flags("--train_file", str(run.tasks), "--max_steps")
    assert main([*flags, "1"]) == 0
    moved = run.tasks.rename(run.tasks.with_name("moved.jsonl"))
    flags[flags.index(str(run.tasks))] = str(moved)
    assert main([*flags, "1"]) == 0, "the same tasks at another place are the same"

    other = run.tasks.with_name("other.jsonl")
    other.write_text('{"query": "two", "scorer": "exact_match", "answer": "2"}\n')
    flags[flags.index(str(moved))] = str(other)
    capsys.readouterr()
    assert main([*flags, "2"]) == 2
    sentence = capsys.readouterr().err
    assert f"--train_file was {run.tasks} and is {other} now" in sentence
    assert "--change_data" in sentence and "another run name" in sentence

    run.add([_of_later_tasks(row) for row in rows[8:12]])
    assert main([*flags, "2", "--change_data"]) == 0
    old, new = run.rows()[:8], run.rows()[8:]
    assert [row["status"] for row in old] == [RowStatus.TRAINED] * 4 + [RowStatus.EVICTED] * 4
    assert [[step["step"] for step in row["trained"]] for row in new] == [[2]] * 4
    left = run.database(lambda db: db.tasks.find({"status": "left_out"}).to_list())
    assert {(task["query"], task["pending"]) for task in left} == {("one", 0)}, "nobody began them"
    tasks = run.database(lambda db: db.tasks.find({"status": {"$ne": "left_out"}}).to_list())
    assert {task["query"] for task in tasks} == {"two"}
    document = run.database(load_run)
    assert document is not None
    began = document.data[-1]
    assert (began.step, began.train_file, len(document.data)) == (1, str(other), 2)
    assert {task["data"] for task in tasks} == {1}
    assert min(task["epoch"] for task in tasks) == began.epoch > 0
    assert main([*flags, "2"]) == 0, "once taken, it is the run's"


def test_a_resume_whose_weights_cannot_be_published_says_so_instead_of_waiting_for_rows(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add(linear_rows(4))
    flags = run.flags("--train_file", str(run.tasks), "--max_steps")
    assert main([*flags, "1"]) == 0
    # No row comes without weights at the services: whoever waits for one waits for ever.
    weights = run.output / "weights"
    shutil.rmtree(weights)
    weights.write_text("no folder")
    capsys.readouterr()
    assert main([*flags, "2"]) == 2
    assert f"weights cannot be written to {weights}" in capsys.readouterr().err


def _of_later_tasks(row: DBRecordData) -> DBRecordData:
    """The row as one of a group behind all that were fed when it was made."""
    return row.model_copy(update={"group_order": group_order(1000, row.group_order)})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--system_prompt", "Be brief."], "--system_prompt was not given and is Be brief. now"),
        (["--agent_name", "math"], "--agent_name was mcp and is math now"),
        (["--lora_rank", "4"], "checkpoint-1 was made with 0, which cannot change on the way"),
    ],
)
def test_another_world_or_adapter_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str], changed: list[str], said: str
) -> None:
    run.add(linear_rows(4))
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "1")
    assert main(flags) == 0
    assert main([*flags, *changed]) == 2
    assert said in capsys.readouterr().err


def test_another_model_is_refused_by_what_is_in_its_folder(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add(linear_rows(4))
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "1")
    assert main(flags) == 0
    copy = tmp_path / "copy"
    shutil.copytree(run.model, copy)
    at_copy = [*flags, "--model_name_or_path", str(copy)]
    assert main(at_copy) == 0
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(at_copy) == 2
    assert f"--model_name_or_path was {run.model} and is {copy} now" in capsys.readouterr().err


def test_rows_of_a_run_whose_folder_was_removed_are_never_trained(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add(linear_rows(8))
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "1")
    assert main(flags) == 0
    shutil.rmtree(run.output)
    assert main(flags) == 2
    sentence = capsys.readouterr().err
    assert f"the database holds a run {run.name!r} already" in sentence
    assert f"agentrl delete {run.name}" in sentence and "--resume_from_checkpoint" in sentence
    trained = [[step["step"] for step in row["trained"]] for row in run.rows()]
    assert trained == [[1]] * 4 + [[]] * 4

    # Told to begin anew in the same database, it leaves them alone too.
    run.add([_of_later_tasks(row) for row in linear_rows(12)[8:]])
    assert main([*flags, "--resume_from_checkpoint", "false"]) == 0
    statuses = [row["status"] for row in run.rows()]
    assert statuses == [RowStatus.EVICTED] * 8 + [RowStatus.TRAINED] * 4


def test_a_folder_whose_database_is_gone_is_not_gone_on_from_unless_its_checkpoint_is_named(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add(linear_rows(4))
    flags = run.flags("--train_file", str(run.tasks), "--max_steps")
    assert main([*flags, "1"]) == 0
    run.database(lambda db: db.client.drop_database(db.name))
    run.add(linear_rows(4))
    assert main([*flags, "2"]) == 2
    sentence = capsys.readouterr().err
    assert f"{run.output} holds run {run.name!r} up to checkpoint-1" in sentence
    named = ["--resume_from_checkpoint", str(run.output / "checkpoint-1")]
    assert named[0] in sentence and named[1] in sentence
    assert main([*flags, "2", *named]) == 0
    assert [line["step"] for line in run.metrics()] == [1, 2]
    run.database(reopen)
    assert main([*flags, "2"]) == 0, "folder and database know each other now"


def test_a_folder_and_a_database_of_two_runs_of_one_name_are_not_mixed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add(linear_rows(4))
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "1")
    assert main(flags) == 0
    mark = run.output / "run.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "identity": "another"}))
    assert main(flags) == 2
    assert "two runs that are both called" in capsys.readouterr().err


async def test_evaluations_of_other_data_are_not_counted_with_those_of_the_present(
    database: RunDatabase,
) -> None:
    await _evaluate(database, data=0, answers={"a": 0.0, "b": 0.0})
    await database.runs.insert_one({"_id": database.name, "data": [{}]})
    assert [(e.step, e.rollouts, e.success) for e in await evaluations(database)] == [(4, 2, 0.0)]
    await database.runs.update_one({}, {"$push": {"data": {"epoch": 1, "step": 4}}})
    assert await evaluations(database) == []
    await _evaluate(database, data=1, answers={"a": 1.0})
    assert [(e.step, e.rollouts, e.success) for e in await evaluations(database)] == [(4, 1, 1.0)]


async def _evaluate(database: RunDatabase, data: int, answers: dict[str, float]) -> None:
    """The evaluation of step 4 on tasks with these ids and scores."""
    feeder = TaskFeeder(
        database, [], [TaskLine(id=name, query="q") for name in answers], num_generations=2,
        eval_rollouts=1, epochs=0, low_water=0, seed=0,
    )  # fmt: skip
    await feeder.start(data)
    await feeder.add_evaluation(4)
    assert not await feeder.evaluation_done(4)
    ledger = TaskLedger(database, "s", lease_seconds=30, max_failures=1)
    while claims := await ledger.claim(Split.EVAL):
        task = await ledger.complete(claims[0], answers[claims[0].task.task_id])
        assert task is not None
        await ledger.finalised(task)
    assert await feeder.evaluation_done(4)


def test_the_model_folder_s_digest_sees_every_piece_of_its_weights(tmp_path: Path) -> None:
    from agentrl.configs.digests import model_digest

    folder = write_tiny_folder(tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    seen = {model_digest(folder)}
    for place in (len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        seen.add(model_digest(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    seen.add(model_digest(folder))
    assert len(seen) == 4 and None not in seen
    assert model_digest(tmp_path) is None
