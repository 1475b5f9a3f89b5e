"""The trainer's process on a real mongod, with rows put in by hand."""

import asyncio
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from forked import Forked, ForkedRanks
from launching import on_two_processes
from tiny import linear_rows, tiny_model
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from trainer_run import Run, start
from transformers import AutoModelForCausalLM

from agentrl.databases import services
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import RowStatus, Split, TaskStatus
from agentrl.databases.row_ledger import count_rows
from agentrl.databases.runs import FINISHED, RunLease, load_run, reopen
from agentrl.inference.client import SGLangClient
from agentrl.inference.protocol import GenerateRequest, SamplingParams
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.training.checkpoint.layout import list_checkpoints, read_state
from agentrl.training.run.publication import Publication, Publisher
from agentrl.training.trainer import main


def test_after_a_kill_every_row_is_trained_once_along_the_checkpoints(
    run: Run, tmp_path: Path
) -> None:
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "8")
    rows = linear_rows(32)
    run.add(rows[:14])  # three steps and a half: it then waits for samplers, which are not there
    process = start(flags, tmp_path / "log")
    run.await_steps(3, process)
    run.await_checkpoint(2, process)
    process.kill()
    process.wait()
    assert [folder.name for folder in list_checkpoints(run.output)] == ["checkpoint-2"]
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    first = run.rows()[0]["trained"][0]["trainer"]

    run.add(rows[14:])
    time.sleep(2.1)  # the dead trainer's lease
    assert main(flags) == 0

    for index, row in enumerate(run.rows()):
        assert row["status"] == RowStatus.TRAINED
        (trained,) = row["trained"]
        assert trained["step"] == index // 4 + 1
        assert (trained["trainer"] == first) == (trained["step"] <= 2)
    assert [line["step"] for line in run.metrics()] == list(range(1, 9))
    versions = [line["version"] for line in run.metrics()]
    assert versions == sorted(set(versions)), "no version was given out twice"
    assert list_checkpoints(run.output)[-1].name == "checkpoint-8"
    document = run.database(load_run)
    assert document is not None
    assert (document.status, document.step, document.trainer) == (FINISHED, 8, None)


def test_sigterm_ends_a_run_in_order_and_it_goes_on_later(run: Run) -> None:
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "5")
    run.add(linear_rows(14))

    def terminate() -> None:
        run.await_steps(3)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    assert main(flags) == 0
    assert list_checkpoints(run.output)[-1].name == "checkpoint-3"
    counts = run.database(count_rows)
    assert counts[RowStatus.LEASED] == 0
    assert (counts[RowStatus.TRAINED], counts[RowStatus.READY]) == (12, 2)
    document = run.database(load_run)
    assert document is not None and document.trainer is None and document.status != FINISHED

    run.add(linear_rows(20)[14:])
    assert main(flags) == 0
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_was_stopped_and_resumed_ends_in_the_same_weights_bit_for_bit(
    run: Run, tmp_path: Path
) -> None:
    flags = run.flags("--enable_sampling", "false", "--max_steps", "4")
    run.add(linear_rows(16))
    assert main(flags) == 0
    straight = gather_state(run.output / "checkpoint-4")
    lines = [(line["loss"], line["grad_norm"]) for line in run.metrics()]

    shutil.rmtree(run.output)
    assert main([*flags, "--max_steps", "2"]) == 0
    assert main(flags) == 0
    assert [(line["loss"], line["grad_norm"]) for line in run.metrics()] == lines
    resumed = gather_state(run.output / "checkpoint-4")
    assert resumed.keys() == straight.keys() and len(straight) > 40
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name


def gather_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, by their names."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def test_a_checkpoint_that_the_disk_refuses_ends_the_run_at_the_next_step(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's file is the largest that a run writes."""
    run.add(linear_rows(16))
    flags = run.flags("--enable_sampling", "false", "--save_steps", "1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    try:
        assert main(flags) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    errors = [line for line in capsys.readouterr().err.splitlines() if "agentrl train:" in line]
    assert len(errors) == 1 and "checkpoint-1 cannot be written: [Errno 27]" in errors[0]
    assert not list_checkpoints(run.output)
    assert len(run.metrics()) < 4
    run.database(reopen)
    assert main(flags) == 0
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]


def test_what_is_left_at_the_end_is_a_smaller_step(run: Run) -> None:
    run.add(linear_rows(10))
    assert main(run.flags("--enable_sampling", "false")) == 0
    assert [line["n_rows"] for line in run.metrics()] == [4, 4, 2]
    assert main(run.flags("--enable_sampling", "false")) == 0, "a finished run has nothing to do"
    assert len(run.metrics()) == 3


def test_starting_anew_trains_all_rows_again_and_hides_the_old_checkpoints(run: Run) -> None:
    run.add(linear_rows(8))
    flags = run.flags("--enable_sampling", "false")
    assert main(flags) == 0
    first = run.metrics()
    assert main([*flags, "--resume_from_checkpoint", "false"]) == 0
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert run.metrics()[0]["loss"] == first[0]["loss"], "from the start weights"
    assert all(len(row["trained"]) == 1 for row in run.rows())
    assert (run.output / "superseded-checkpoint-2").is_dir()


def test_rows_older_than_the_staleness_bound_are_never_trained(run: Run, tmp_path: Path) -> None:
    run.add(linear_rows(12, version=0))
    flags = run.flags("--train_file", str(run.tasks), "--max_staleness", "1")
    process = start(flags, tmp_path / "log")
    try:
        run.await_steps(2, process)
        deadline = time.monotonic() + 60
        while run.rows()[-1]["status"] == "ready" and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert [row["status"] for row in run.rows()] == ["trained"] * 8 + ["evicted"] * 4
    assert max(line["staleness_max"] for line in run.metrics()) == 1


def test_evaluations_come_before_the_first_step_and_after_the_last(run: Run) -> None:
    run.add(linear_rows(8))
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    async def evaluate(database: RunDatabase) -> None:
        """In the samplers' place: ends each evaluation, and notes how far training was."""
        while not ended.is_set():
            query = {"split": Split.EVAL, "status": TaskStatus.CREATED}
            async for task in database.tasks.find(query):
                await asyncio.sleep(0.3)
                trained = await database.rows.count_documents({"status": RowStatus.TRAINED})
                seen.append((task["epoch"], trained))
                done = {"$set": {"status": TaskStatus.COMPLETED}}
                await database.tasks.update_one({"_id": task["_id"]}, done)
            await asyncio.sleep(0.05)

    sampler = threading.Thread(target=lambda: run.database(evaluate))
    sampler.start()
    try:
        assert main(run.flags("--enable_sampling", "false", "--eval_file", str(run.tasks))) == 0
    finally:
        ended.set()
        sampler.join()
    assert seen == [(0, 0), (2, 8)]


def test_with_eval_steps_0_nothing_is_evaluated(run: Run) -> None:
    run.add(linear_rows(8))
    flags = ["--enable_sampling", "false", "--eval_file", str(run.tasks), "--eval_steps", "0"]
    assert main(run.flags(*flags)) == 0
    assert [row["status"] for row in run.rows()] == ["trained"] * 8
    assert run.database(lambda db: db.tasks.count_documents({"split": Split.EVAL})) == 0


def test_services_get_every_version_also_those_that_come_back(run: Run) -> None:
    command = [
        "-m", "agentrl.cli", "serve", "--model", str(run.model), "--port", "0",
        "--db_connection_string", run.url, "--run_name", run.name,
    ]  # fmt: skip
    server = Forked(command)
    try:
        deadline = time.monotonic() + 60
        while not run.database(lambda db: services.live_services(db, 60)):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        run.add(linear_rows(8))
        assert main(run.flags("--enable_sampling", "false", "--lease_seconds", "60")) == 0
        run.database(lambda db: check_service(db, run))
    finally:
        server.terminate()
        server.wait(timeout=20)
    assert sorted(p.name for p in (run.output / "weights").iterdir()) == ["v0", "v1", "v2"]


async def check_service(database: RunDatabase, run: Run) -> None:
    (service,) = await services.live_services(database, 60)
    assert service.weight_version == 2
    prompt = (5, 6, 7, 8)
    async with SGLangClient(service.url) as client:
        assert await client.weight_version() == 2
        answer = await client.generate(
            GenerateRequest("one", prompt, SamplingParams(max_new_tokens=6, ignore_eos=True))
        )
    model = AutoModelForCausalLM.from_pretrained(run.output / "weights" / "v2")
    ids = torch.tensor([[*prompt, *answer.output_ids]])
    log_p = torch.log_softmax(model(input_ids=ids).logits[0], -1)
    expected = [log_p[3 + i, token].item() for i, token in enumerate(answer.output_ids)]
    assert answer.output_logprobs == pytest.approx(expected, abs=1e-4)
    start = torch.log_softmax(tiny_model()(input_ids=ids).logits[0], -1)
    assert (start - log_p).abs().max() > 1e-3, "they are not the start weights"

    # the service was away and comes back with other weights
    async def ours() -> None:
        """Nobody takes the run."""

    publisher = Publisher(database, run.output, 60, DiskUpdater(), "retract", hold=ours)
    folder = run.output.resolve() / "weights" / "v2"
    await publisher.publish(Publication(9, 2, folder, gather=dict, write=lambda: None))
    await services.register(database, service.url, str(run.model), service.capacity)
    keeping = asyncio.create_task(publisher.keep_current(patience_s=60))
    for _ in range(100):
        await asyncio.sleep(0.1)
        (service,) = await services.live_services(database, 60)
        if service.weight_version == 9:
            break
    keeping.cancel()
    assert service.weight_version == 9


@pytest.mark.parametrize("more", [[], ["--max_steps", "9"]], ids=["last step", "last rows"])
def test_every_so_many_steps_are_published_and_the_last_one(run: Run, more: list[str]) -> None:
    run.add(linear_rows(20))
    assert main(run.flags("--enable_sampling", "false", "--publish_steps", "2", *more)) == 0
    published = run.database(lambda db: db.policy_versions.find({}).sort("version", 1).to_list())
    assert [(each["version"], each["step"]) for each in published] == [
        (0, 0), (1, 2), (2, 4), (3, 5),
    ]  # fmt: skip
    # The version whose services sampled while the step was trained.
    assert [line["version"] for line in run.metrics()] == [0, 0, 1, 1, 2]


def test_a_second_trainer_is_refused_while_the_first_lives(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.database(lambda db: RunLease(db, "first", "host-a", 60).acquire(4))
    assert main(run.flags("--enable_sampling", "false")) == 2
    said = capsys.readouterr().err
    assert "has a live trainer (first on host-a)" in said
    assert not (run.output / "weights").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model_name_or_path", "/no/such"], "--model_name_or_path /no/such: there is no such"),
        (["--resume_from_checkpoint", "true"], "there is no checkpoint in"),
        (["--resume_from_checkpoint", "/no/such"], "/no/such is no complete checkpoint"),
        (["--train_file", "/no/such"], "task file /no/such cannot be read"),
        (["--output_dir", "/proc/run"], "--output_dir /proc/run: cannot be written"),
        (
            ["--db_connection_string", "mongodb://127.0.0.1:9", "--startup_timeout", "0.3"],
            "MongoDB at mongodb://127.0.0.1:9 did not answer",
        ),
        ([], "--train_file is needed"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    run: Run, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run.flags(*flags)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "agentrl train:" in line]
    assert len(errors) == 1 and said in errors[0]
    assert not (run.output / "weights").exists()
    assert run.rows() == []


def test_services_out_of_reach_end_the_run_with_their_urls_and_the_time_they_were_tried(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "8")
    assert main([*flags, "--inference_urls", "http://127.0.0.1:9", "--startup_timeout", "2"]) == 2
    said = capsys.readouterr().err
    assert "no inference service took the weights within 2 s (http://127.0.0.1:9: " in said


def test_two_processes_train_a_run_like_one_and_save_it_like_one(run: Run) -> None:
    flags = run.flags("--enable_sampling", "false")
    flags[flags.index("--per_device_train_batch_size") + 1] = "2"
    run.add(linear_rows(9))  # the last step has one row, which leaves a process without
    log = run.output.with_name("log")
    ranks = ForkedRanks(2, log, ["-m", "agentrl.training.trainer", *flags])
    assert ranks.wait() == 0, log.read_text()
    assert [row["trained"][0]["step"] for row in run.rows()] == [1] * 4 + [2] * 4 + [3]
    two = run.metrics()
    assert sorted(path.name for path in run.output.glob("checkpoint-*")) == [
        "checkpoint-2", "checkpoint-3",
    ]  # fmt: skip
    for checkpoint in list_checkpoints(run.output):
        assert read_state(checkpoint).processes == 2
        assert {path.name for path in checkpoint.glob("*.distcp")} == {
            "__0_0.distcp", "__1_0.distcp",
        }  # fmt: skip

    saved_by_two = gather_state(run.output / "checkpoint-3")

    alone = run.flags("--enable_sampling", "false", "--resume_from_checkpoint", "false")
    assert main(alone) == 0
    for ours, theirs in zip(run.metrics(), two, strict=True):
        for name in ("loss", "grad_norm", "ratio_max", "clip_fraction", "n_rows", "reward_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name
    for name, value in gather_state(run.output / "checkpoint-3").items():
        if name.startswith("model."):
            torch.testing.assert_close(saved_by_two[name], value, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
def test_what_stops_one_of_two_processes_ends_both_in_one_sentence(run: Run) -> None:
    run.database(lambda db: RunLease(db, "first", "host-a", 60).acquire(4))
    refused = on_two_processes(run.flags("--enable_sampling", "false"))
    assert refused.returncode != 0
    said = [line for line in refused.stderr.splitlines() if line.startswith("agentrl train")]
    assert len(said) == 1 and "has a live trainer (first on host-a)" in said[0]
    assert "Traceback" not in refused.stderr.split(said[0])[0]
