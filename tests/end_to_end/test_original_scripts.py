"""The original's three scripts, started as there: `accelerate launch` on each node."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pymongo
import pytest
from ports import free_port

from agentrl.databases.mongod import EmbeddedMongod

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from original_scripts import SCRIPTS  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = HERE.parents[1]
DEMO = ROOT / "assets" / "demo"
AGENTS = """
browse_agent: {models: [{api_key: k, base_url: "http://127.0.0.1:1/v1", model: m}], status: false}
scorer_agent: {models: [{api_key: k, base_url: "http://127.0.0.1:1/v1", model: m}]}
"""


@dataclass
class Workplace:
    """A folder with a checkout's `src` and what the user of a script has filled in."""

    folder: Path
    url: str
    manager: str

    def run(
        self, script: str, name: str, machines: int = 1, processes: int = 1, more: str = ""
    ) -> list[int]:
        """Start a script on each node, and return their exit statuses.

        `processes`: of each node. `more`: further flags.
        """
        path = self.folder / f"{script}_example.sh"
        path.write_text(SCRIPTS[script].text.replace("--seed 42", f"--seed 42 {more}"))
        port = free_port()
        nodes = [
            subprocess.Popen(
                ["bash", str(path), name],
                cwd=self.folder,
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "DB": self.url, "MANAGER": self.manager, "MODEL": str(self.folder / "model"),
                    "TASKS": str(self.folder / "tasks.jsonl"), "MAX_STEPS": "2", "ROWS": "8",
                    "NUM_PROCESSES": str(machines * processes), "NUM_MACHINES": str(machines),
                    "MACHINE_RANK": str(machine), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                },
            )
            for machine in range(machines)
        ]  # fmt: skip
        try:
            return [node.wait(timeout=1500) for node in nodes]
        finally:
            for node in nodes:
                if node.poll() is None:
                    node.terminate()

    def log(self, name: str, kind: str, machine: int = 0) -> str:
        return (self.folder / "logs" / "as" / f"{name}_{kind}_{machine}.log").read_text()

    def logs(self, name: str) -> set[str]:
        return {log.name for log in (self.folder / "logs" / "as").glob(f"{name}_*")}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("original")
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "assets").mkdir()
    (folder / "assets" / "fsdp2_cpu.yml").write_text((ROOT / "assets/fsdp2_cpu.yml").read_text())
    (folder / "assets" / "agent_config.yml").write_text(AGENTS)
    (folder / "model").mkdir()
    for file in (DEMO / "model").iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    config = json.loads((DEMO / "model" / "config.json").read_text())
    config["max_position_embeddings"] = 131072  # of the scripts' prompts
    (folder / "model" / "config.json").write_text(json.dumps(config))
    tasks = [json.loads(line) for line in (DEMO / "train.jsonl").read_text().splitlines()[:24]]
    for task in tasks:
        del task["answer_schema"]  # `answer` is the default there
        task["system_prompt"] = ""  # the tiny model has seen none
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    mongod = EmbeddedMongod(folder / "mongo", folder / "mongod.log")
    url = mongod.start().partition("/?")[0]
    port = free_port()
    manager = subprocess.Popen([sys.executable, str(HERE / "warehouse_manager.py"), str(port)])
    deadline = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert manager.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    yield Workplace(folder, url, f"http://127.0.0.1:{port}/mcpapi")
    manager.terminate()
    manager.wait()
    mongod.stop()


def run_document(workplace: Workplace, name: str) -> dict[str, object]:
    with pymongo.MongoClient(f"{workplace.url}/?directConnection=true") as client:
        found = client[name]["runs"].find_one()
        assert found is not None
        return dict(found)


def test_grpo_trains_in_one_process_with_its_services_and_samplers(workplace: Workplace) -> None:
    assert workplace.run("grpo", "one") == [0], workplace.log("one", "train")
    log = workplace.log("one", "train")
    assert "step 2 of 2" in log and "report: output/one/summary.json" in log
    # What has nothing to do here is said once, with the reason.
    assert "--cpu_ram_efficient_loading: each process always reads only its shard" in log
    assert workplace.logs("one") == {"one_train_0.log", "one_serve.log", "one_sample-0.log"}
    checkpoint = workplace.folder / "output" / "one" / "checkpoint-2"
    assert checkpoint.is_dir()
    assert run_document(workplace, "one")["status"] == "finished"
    with pymongo.MongoClient(f"{workplace.url}/?directConnection=true") as client:
        record = client["one"]["records"].find_one({"score": 1.0})
        assert record is not None and record["n_tool_calls"] > 0 and record["final_answer"]


def test_minirl_trains_on_two_nodes_that_each_sample(workplace: Workplace) -> None:
    assert workplace.run("minirl", "two", machines=2) == [0, 0], workplace.log("two", "train")
    assert "step 2 of 2" in workplace.log("two", "train", 0)
    assert "trainer processes 2" in workplace.log("two", "train", 1)
    assert workplace.logs("two") == {
        "two_train_0.log", "two_serve.log", "two_sample-0.log",
        "two_train_1.log", "two_serve-1.log", "two_sample-1-0.log",
    }  # fmt: skip
    with pymongo.MongoClient(f"{workplace.url}/?directConnection=true") as client:
        turns = client["two"]["dispatched_sampling_tasks"]
        assert len(turns.distinct("service")) == 2  # both nodes' services answered
        assert len(client["two"]["records"].distinct("owner")) == 2


def test_the_evaluation_samples_and_scores_without_a_trainer(workplace: Workplace) -> None:
    assert workplace.run("eval", "measured") == [0], workplace.log("measured", "eval")
    log = workplace.log("measured", "eval")
    assert "no trainer" in log and "success" in log
    with pymongo.MongoClient(f"{workplace.url}/?directConnection=true") as client:
        tasks = client["measured"]["tasks"]
        assert tasks.count_documents({}) == tasks.count_documents({"status": "completed"}) == 24
        scored = client["measured"]["records"].count_documents({"score": {"$ne": None}})
        assert scored == 24 * 4
    assert not (workplace.folder / "output" / "measured" / "checkpoint-1").exists()


def test_what_is_wrong_is_one_sentence_of_the_first_process_of_a_node(
    workplace: Workplace,
) -> None:
    assert workplace.run("grpo", "wrong", processes=2, more="--cp_size 3") != [0]
    log = workplace.log("wrong", "train")
    assert log.count("src/main.py: --tp_size 1 x --cp_size 3") == 1
    assert log.count("--cpu_ram_efficient_loading: each process") == 1
    assert workplace.logs("wrong") == {"wrong_train_0.log"}  # nothing was started
