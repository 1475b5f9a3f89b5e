"""The GPUs of a machine, as nvidia-smi lists them and as a text describes them."""

import os
from pathlib import Path

import pytest

from agentrl.configs import ConfigError
from agentrl.launcher import deployment, inventory
from agentrl.launcher.deployment import usable_cores, usable_memory
from agentrl.launcher.inventory import GIB, described, listed_gpus, read_inventory, visible

LISTED = """\
0, GPU-aaaa1111, NVIDIA H100 80GB HBM3, 81559, 81079, Disabled
1, GPU-aabb2222, NVIDIA H100 80GB HBM3, 81559, 40000, Disabled
2, GPU-cccc3333, NVIDIA H100 80GB HBM3, 81559, 81079, Disabled
"""


@pytest.mark.parametrize(
    ("named", "devices"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("GPU-cccc,1", ["2", "1"]),
        ("1,9,0", ["1"]),  # CUDA stops at the first that is none
        ("GPU-aa", []),  # two GPUs
        ("", []),
    ],
)
def test_the_gpus_are_those_that_cuda_would_see(named: str | None, devices: list[str]) -> None:
    assert [gpu.device for gpu in visible(listed_gpus(LISTED), named)] == devices


def test_the_least_free_memory_counts_and_a_part_of_a_gpu_is_refused() -> None:
    gpus = visible(listed_gpus(LISTED), None)
    assert inventory.Inventory(gpus).free == 40000 * 2**20
    assert "(NVIDIA H100 80GB HBM3)" in inventory.Inventory(gpus).line
    with pytest.raises(ConfigError, match="names a part of a GPU"):
        visible(listed_gpus(LISTED), "MIG-1")


@pytest.mark.parametrize(
    ("memory", "mig", "said"),
    [
        ("81559, 81079", "Enabled", "is divided by MIG, .* leave it out .* nvidia-smi -i 1 -mig 0"),
        ("[N/A], [N/A]", "Enabled", "is divided by MIG"),
        ("[N/A], [N/A]", "[N/A]", r"has memory that nvidia-smi does not know \(\[N/A\]\)"),
        ("81559, [GPU requires reset]", "Disabled", r".* not know \(\[GPU requires reset\]\)"),
    ],
)
def test_a_gpu_on_which_nothing_can_be_placed_is_refused_and_can_be_left_out(
    memory: str, mig: str, said: str
) -> None:
    gpus = listed_gpus(
        f"0, GPU-0, NVIDIA L4, 23034, 22563, [N/A]\n1, GPU-1, Odd, {memory}, {mig}\n"
        "2, GPU-2, NVIDIA L4, 23034, 22563, [N/A]"
    )
    for named in (None, "1", "0,GPU-1"):
        with pytest.raises(ConfigError, match=rf"GPU 1 \(Odd\) {said}"):
            visible(gpus, named)
    assert [gpu.device for gpu in visible(gpus, "0,2")] == ["0", "2"]


def test_blank_lines_and_warnings_beside_the_table_are_no_gpus() -> None:
    warned = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0"
    assert listed_gpus(f"\n{warned}\n{LISTED}\n  \n{warned}\n") == listed_gpus(LISTED)


def nvidia_smi(folder: Path, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of three GPUs whose nvidia-smi is this shell script."""
    monkeypatch.setattr(inventory, "count_gpus", lambda environment: 3)
    monkeypatch.setenv("PATH", str(folder))
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)


def test_a_machine_is_asked_by_its_own_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = "index,uuid,name,memory.total,memory.free,mig.mode.current"  # as it calls them
    said = f"[ $1 = --query-gpu={fields} ] || exit 2\n/bin/cat <<'END'\n{LISTED}END"
    nvidia_smi(tmp_path, said, monkeypatch)
    found = read_inventory({"CUDA_VISIBLE_DEVICES": "0,2"}, 2)
    assert [gpu.device for gpu in found.gpus] == ["0", "2"] and found.machines == 2
    assert found.host_bytes == usable_memory()
    (tmp_path / "nvidia-smi").unlink()
    with pytest.raises(ConfigError, match="does not list them"):
        read_inventory({})


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("0,2,0", "names GPU 0 twice"),
        ("1,GPU-aabb", "names GPU 1 twice"),
        ("7", "=7: names none of the GPUs of this machine, which are 0, 1, 2; leave it empty"),
        ("gpu-aaaa1111", "names none of the GPUs"),
    ],
)
def test_gpus_that_cuda_would_not_use_are_refused_and_not_trained_on_the_cpu_instead(
    named: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, f"/bin/cat <<'END'\n{LISTED}END", monkeypatch)
    with pytest.raises(ConfigError, match=said):
        read_inventory({"CUDA_VISIBLE_DEVICES": named})


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ("echo No devices were found; exit 6", r"does not list them \(status 6: No devices were f"),
        ("echo Driver mismatch >&2; exit 18", r"does not list them \(status 18: Driver mismatch"),
        ("exit 0", r"does not list them \(status 0"),
        ("echo Unable to determine the device handle", "says: Unable to determine the device ha"),
    ],
)
def test_what_nvidia_smi_says_instead_of_gpus_is_passed_on(
    says: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, says, monkeypatch)
    with pytest.raises(ConfigError, match=said):
        read_inventory({})


def test_a_kernel_without_control_groups_limits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(deployment, "_CONTROL_GROUPS", tmp_path)
    assert usable_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "usable"), [("max", None), ("1073741824", GIB), (str(2**60), None)]
)
@pytest.mark.parametrize(
    ("own", "limited"),
    [
        ("0::/", "."),  # a container
        ("1:cpu:/\n0::/slurmstepd.scope/job_7/step_0/task_0", "slurmstepd.scope/job_7"),
        ("0::/docker/1a2b", "."),  # named as outside of the container
    ],
)
def test_host_memory_and_cores_are_those_of_the_container_and_of_the_job(
    own: str,
    limited: str,
    limit: str,
    usable: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = tmp_path / "groups"
    (groups / "slurmstepd.scope/job_7/step_0/task_0").mkdir(parents=True)
    (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(deployment, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(deployment, "_CONTROL_GROUPS", groups)
    assert usable_memory() == whole
    assert usable_cores() == len(os.sched_getaffinity(0))
    (groups / "slurmstepd.scope/job_7/step_0/task_0/memory.max").write_text("max\n")
    (groups / limited / "memory.max").write_text(f"{limit}\n")
    assert usable_memory() == (usable or whole)
    (groups / limited / "cpu.max").write_text("150000 100000\n")
    assert usable_cores() == 1


def test_an_inventory_can_be_described_for_planning() -> None:
    assert [gpu.free for gpu in described("2x24").gpus] == [24 * GIB, 24 * GIB]
    assert described("2x8x141").machines == 2 and len(described("2x8x141").gpus) == 8
    for wrong in ("8", "0x80", "00x80", "00x8x80", "8x0", "8x0.0", "axb", "8x80x"):
        with pytest.raises(ConfigError, match=f"--gpus {wrong}: give the number"):
            described(wrong)
