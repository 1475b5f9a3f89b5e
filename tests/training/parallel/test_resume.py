"""A checkpoint of any arrangement of processes is gone on from by any other."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from launching import launch
from resume_cases import ARRANGEMENTS, PROCESSES, make_learner, take_steps, total_steps

from agentrl.training.checkpoint.layout import list_checkpoints
from agentrl.training.checkpoint.save import load_checkpoint
from agentrl.training.parallel import make_mesh

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the launched processes' checkpoints."""
    out = tmp_path_factory.mktemp("resumed")
    assert launch(HERE / "resume_worker.py", PROCESSES, out).wait() == 0, (out / "log").read_text()
    return out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", list(ARRANGEMENTS))
def test_each_step_may_be_taken_by_another_arrangement(case: str, launched: Path) -> None:
    mesh = make_mesh(Accelerator(cpu=True))
    straight = make_learner(case, mesh, resumed=False)
    last = total_steps(case)
    expected = take_steps(case, straight, mesh, range(1, last + 1))

    resumed = make_learner(case, mesh, resumed=True)
    assert load_checkpoint(list_checkpoints(launched / case)[-1], resumed).step == last - 1
    norms = json.loads((launched / f"{case}.json").read_text())
    norms += take_steps(case, resumed, mesh, [last])
    assert norms == pytest.approx(expected, rel=1e-3)
    for (name, ours), theirs in zip(
        resumed.model.named_parameters(), straight.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            ours.full_tensor(), theirs.full_tensor(), atol=5e-4, rtol=1e-3,
            msg=lambda message, name=name: f"{name}: {message}",
        )  # fmt: skip
