"""`deploy/node`: the units name what is there, and a Slurm job's script brings a run to its end."""

import configparser
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from ports import free_port
from pymongo import MongoClient

from agentrl.databases.mongod import EmbeddedMongod

ROOT = Path(__file__).resolve().parents[2]
NODE = ROOT / "deploy" / "node"
DEMO = ROOT / "assets" / "demo"
INSTALLED = "/opt/agentrl"  # where the units expect the repository

# Slurm is not there: these say and do what its commands would for a job of two nodes, both of which
# are this machine.
SCONTROL = "#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n"
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do echo "$1" >>"$SRUN_LOG"; shift; done
export SLURM_PROCID=0
exec "$@"
"""


@pytest.mark.parametrize("role", ["serve", "sample", "train"])
def test_a_unit_starts_its_role_again_and_again(role: str, tmp_path: Path) -> None:
    text = (NODE / f"agentrl-{role}@.service").read_text()
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    script, argument = unit["Service"]["ExecStart"].split()
    path = ROOT / Path(script).relative_to(INSTALLED)
    assert os.access(path, os.X_OK) and argument == role
    assert unit["Service"]["Restart"] in ("always", "on-failure")
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    if shutil.which("systemd-analyze"):
        here = tmp_path / f"agentrl-{role}@.service"
        here.write_text(text.replace(INSTALLED, str(ROOT)))
        verify = subprocess.run(["systemd-analyze", "verify", str(here)], capture_output=True)
        assert verify.stderr == b""


@pytest.mark.parametrize(
    ("environment", "message"),
    [({}, "RUN"), ({"RUN": "r"}, "DB_URL"), ({"RUN": "r", "DB_URL": "mongodb://db"}, "MODEL")],
)
def test_what_a_node_needs_to_know_is_asked_for(environment: dict[str, str], message: str) -> None:
    result = subprocess.run(
        [str(NODE / "start.sh"), "train"], capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], **environment},
    )  # fmt: skip
    assert result.returncode != 0 and f"{message}: the " in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slurm_job_serves_samples_and_trains_a_run_to_its_end(
    mongod: EmbeddedMongod, tmp_path: Path
) -> None:
    run = f"test-{uuid4().hex[:8]}"
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    tools_port = free_port()
    flags = [
        "--output_dir", str(tmp_path / "output"), "--per_device_train_batch_size", "8",
        "--num_generations", "4", "--max_steps", "2", "--max_tokens", "384",
        "--max_new_tokens", "48", "--drop_zero_advantage", "false",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node-[a-b]",
        "SRUN_LOG": str(tmp_path / "srun.log"),
        "RUN": run, "DB_URL": mongod.url, "MODEL": str(DEMO / "model"),
        "TRAIN_FILE": str(DEMO / "train.jsonl"), "FLAGS": " ".join(flags),
        "MCP_URL": f"http://127.0.0.1:{tools_port}/mcp",
        "SERVICE_PORT": str(free_port()), "NODE_ADDRESS": "127.0.0.1", "SAMPLERS_PER_NODE": "1",
        "MASTER_PORT": str(free_port()), "INFERENCE_API_KEY": "a-key",
    }  # fmt: skip
    with ExitStack() as stack:
        tools = stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(DEMO / "tool_server.py"), "--port", str(tools_port)]
            )
        )
        stack.callback(tools.kill)
        job = subprocess.run(
            ["bash", str(NODE / "run.sbatch")], env=environment, capture_output=True, text=True
        )
    assert job.returncode == 0, job.stdout + job.stderr
    summary = json.loads((tmp_path / "output" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["rows"]["trained"] == 16
    placed = [line for line in (tmp_path / "srun.log").read_text().split() if "nodelist" in line]
    assert sorted(placed) == ["--nodelist=node-a", "--nodelist=node-b", "--nodelist=node-b"]
    with MongoClient[dict[str, Any]](mongod.url) as client:
        assert client[run]["inference_services"].count_documents({}) == 0  # it left in order
        client.drop_database(run)
    for log in (ROOT / "logs" / "as").glob(f"{run}_*"):
        log.unlink()
