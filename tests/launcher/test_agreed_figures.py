"""Processes that see different free memory plan the same, by real processes and a real store."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from forked import Forked, preload
from placed_models import MIDDLE
from ports import free_port

from agentrl.configs import ConfigError
from agentrl.launcher.agreed_figures import Figures, Meeting, agreed, least
from agentrl.launcher.inventory import GIB, described
from agentrl.launcher.placement import Asked, place
from agentrl.training.model.memory_model import MemorySetup

preload("agentrl.launcher.agreed_figures", "agentrl.launcher.gpu_plan", "torch.distributed")
ROOT = Path(__file__).parents[2]
ASKED = Asked(tokens=16384, setup=MemorySetup(tokens=1, bf16=True))
PLANS = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import json, os
from dataclasses import replace
from placed_models import MIDDLE
from agentrl.launcher.agreed_figures import Meeting, agreed
from agentrl.launcher.inventory import described
from agentrl.launcher.placement import Asked, place
from agentrl.launcher.script_environment import Place
from agentrl.training.model.memory_model import MemorySetup

gpus, host, meeting = sys.argv[1:]
found = replace(described(gpus), host_bytes=int(host))
where = (
    Meeting(**json.loads(meeting)) if meeting != "accelerate"
    else Meeting.of_processes(Place.read(os.environ), os.environ)
)
found = agreed(found, where, 60)
plan = place(found, MIDDLE, Asked(tokens=16384, setup=MemorySetup(tokens=1, bf16=True)))
print(json.dumps([plan.train.tokens, plan.train.checkpointing, plan.train.gpus, plan.serve.share,
                  found.host_bytes]), flush=True)
"""


def planned(gpus: str) -> list[object]:
    """What a process plans by itself that sees these GPUs."""
    plan = place(described(gpus), MIDDLE, ASKED)
    assert plan is not None and plan.serve is not None
    train = plan.train
    return [train.tokens, train.checkpointing, train.gpus, plan.serve.share]


def meet(seen: Sequence[tuple[str, int]], processes_each: int = 1) -> list[list[object]]:
    """What processes plan that see these GPUs and host memory, one after the other machine."""
    port = free_port()
    started = []
    for number, (gpus, host) in enumerate(seen):
        machine, local = divmod(number, processes_each)
        meeting = {
            "machine": machine, "machines": len(seen) // processes_each, "reads": local == 0,
            "processes": len(seen), "address": "127.0.0.1", "port": port, "hosts": number == 0,
        }  # fmt: skip
        started.append(Forked(["-c", PLANS, gpus, str(host), json.dumps(meeting)], piped=True))
    outputs = []
    for process in started:
        assert process.stdout is not None
        outputs.append(json.loads(process.stdout.readline()))
        assert process.wait() == 0
    return outputs


def test_two_machines_with_different_free_memory_plan_the_same() -> None:
    more, less = "2x8x80", "2x8x44"
    assert planned(more) != planned(less), "each by itself would plan otherwise"
    one, two = meet([(more, 900 * GIB), (less, 1000 * GIB)])
    assert one == two == [*planned(less), 900 * GIB]


def test_a_process_that_looks_after_services_have_begun_plans_with_what_was_free_before() -> None:
    first, late = meet([("8x80", 900 * GIB), ("8x44", 900 * GIB)], processes_each=2)
    assert first == late == [*planned("8x80"), 900 * GIB]


@pytest.mark.slow  # Accelerate and torch's agent load for seconds
def test_processes_of_accelerate_meet_in_its_own_store(tmp_path: Path) -> None:
    program = tmp_path / "plans.py"
    # The second process sees less.
    program.write_text(
        PLANS.replace("gpus, host, meeting = sys.argv[1:]",
                      "gpus, host, meeting = ('8x80', '8x44')[int(os.environ['RANK'])], 2**40, "
                      "'accelerate'")
    )  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file",
            str(ROOT / "assets" / "fsdp2_cpu.yml"), "--num_processes", "2",
            "--main_process_port", str(free_port()), str(program),
        ],
        text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    plans = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert plans == [[*planned("8x80"), 2**40]] * 2, done.stdout + done.stderr


def test_machines_with_different_numbers_of_gpus_are_refused() -> None:
    here = described("2x8x80")
    with pytest.raises(ConfigError, match="have 8, 4 GPUs to use"):
        least(here, [Figures.of(here), Figures.of(described("2x4x80"))])


def test_the_gpu_with_the_least_free_memory_is_named_with_its_machine() -> None:
    here = described("2x8x80")
    busy = replace(here.gpus[5], free=GIB // 2)
    there = replace(here, gpus=(*here.gpus[:5], busy, *here.gpus[6:]))
    for own in (here, there):  # both plan, and say, the same
        found = least(own, [Figures.of(here), Figures.of(there)])
        assert found.free == GIB // 2
        assert "0.5 GiB free on each of 2 machines, because GPU 5 of machine 1 has no" in found.line
        (rest,) = found.freer()
        assert rest.free == 80 * GIB and len(rest.gpus) == 7
        assert "and as many on each of the other machines" in found.choosing(rest)
    smaller = least(here, [Figures.of(here), Figures.of(described("2x8x44"))])
    assert "44 GiB free on each of 2 machines, because GPU 0 of machine 1 has no" in smaller.line
    assert least(here, [Figures.of(here)] * 2).line == here.line


def test_a_machine_that_does_not_come_is_said() -> None:
    alone = Meeting(0, 2, True, 2, "127.0.0.1", free_port(), hosts=True)
    with pytest.raises(ConfigError, match=r"the 2 machine\(s\) of this run did not meet at"):
        agreed(described("2x8x80"), alone, patience_s=0.5)


def test_the_port_is_free_for_the_trainers_once_the_plan_is_made() -> None:
    port = free_port()
    for _ in range(3):
        alone = Meeting(0, 1, True, 1, "127.0.0.1", port, hosts=True)
        assert agreed(described("8x80"), alone, patience_s=5).free == 80 * GIB
