"""`deploy/node`: the units name what is there, and a Slurm job's script brings a run to its end."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import time
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


def test_a_service_gets_its_own_flags_and_not_the_runs() -> None:
    result = subprocess.run(
        [str(NODE / "start.sh"), "serve"], capture_output=True, text=True,
        env={
            **os.environ, "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "",
            "RUN": "r", "DB_URL": "mongodb://db", "MODEL": "m", "INFERENCE_API_KEY": "a-key",
            "FLAGS": "--max_steps none", "SERVE_FLAGS": "--fp32_head --weight_version two",
        },
    )  # fmt: skip
    assert result.returncode == 2
    assert "weight_version" in result.stderr and "max_steps" not in result.stderr


# Roles that save for a while after SIGTERM, each for its own time.
SAVING_ROLE = """#!/bin/bash
trap 'sleep "${SAVES_S[$1]}"; echo "$1 saved" >>"$SAVED"; exit "$STATUS"' TERM
declare -A SAVES_S=([train]=0.3 [sample]=0.6 [serve]=0.9)
echo "$1" >>"$SAVED"
while :; do
    [ "$1 $FAILS $(wc -l <"$SAVED")" != "train yes 3" ] || exit 7
    sleep 0.05
done
"""


def slurm_job(folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    """A job of two nodes whose roles are `SAVING_ROLE`; SAVED is the file that they write."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    start = folder / "deploy" / "node" / "start.sh"
    start.parent.mkdir(parents=True)
    start.write_text(SAVING_ROLE)
    start.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SRUN_LOG": str(folder / "srun.log"),
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node-[a-b]",
        "SAVED": str(folder / "saved"), **variables,
    }  # fmt: skip
    return subprocess.Popen(["bash", str(NODE / "run.sbatch")], env=environment)


def said(folder: Path) -> list[str]:
    saved = folder / "saved"
    return saved.read_text().splitlines() if saved.exists() else []


@pytest.mark.timeout(30)
def test_a_slurm_job_that_is_told_to_stop_ends_when_its_roles_have_saved(tmp_path: Path) -> None:
    job = slurm_job(tmp_path, STATUS="3", FAILS="no")
    while len(said(tmp_path)) < 3:
        time.sleep(0.02)
    job.terminate()
    assert job.wait() == 3  # the trainer's
    assert sorted(said(tmp_path)[3:]) == ["sample saved", "serve saved", "train saved"]


@pytest.mark.timeout(30)
def test_a_slurm_job_whose_trainer_fails_stops_the_other_roles(tmp_path: Path) -> None:
    job = slurm_job(tmp_path, STATUS="0", FAILS="yes")
    assert job.wait() == 7
    assert sorted(said(tmp_path)[-2:]) == ["sample saved", "serve saved"]


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
