"""The runner of GPU checks: what one check does, no other one suffers from."""

import json
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the runner is a program and no package

import check_runner
from check_list import CHECKS, Check
from check_runner import WHOLE_S, main, run_check, run_checks, select


def check(name: str, limit_s: float = 30.0, gpus: int = 1) -> Check:
    return Check(name, "for a test", f"unwell_checks:{name}", limit_s, gpus)


UNWELL = [
    check("is_wrong"), check("crashes"), check("hangs", limit_s=0.5), check("ends_early"),
    check("absent"), check("is_elsewhere"), check("passes"),
]  # fmt: skip


def test_each_check_is_reported_by_name_and_none_is_hidden_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_runner, "ROOT", tmp_path)
    monkeypatch.setattr(check_runner, "GRACE_S", 0.5)
    file = tmp_path / "found" / "results.json"
    assert main(["--out", str(file)], UNWELL) == 1
    results = json.loads(file.read_text())
    errors = {found["name"]: found["error"] for found in results["checks"]}
    assert errors == {
        "is_wrong": "CheckFailed: three is not four",
        "crashes": "its process ended with status 137",
        "hangs": "not done within 4 s",  # its limit times eight, on a CPU
        "ends_early": "its process ended with status 0",
        "absent": "AttributeError: module 'unwell_checks' has no attribute 'absent'",
        "is_elsewhere": "needs 9 GiB",
        "passes": None,
    }
    wrong, _, hangs, *_, elsewhere, passes = results["checks"]
    assert wrong["status"] == "failed" and wrong["figures"] == {"found": 3}
    assert "three is not four" in wrong["log_tail"]
    assert hangs["status"] == "timed out"
    assert not psutil.pid_exists(hangs["figures"]["child"])
    assert elsewhere["status"] == "skipped"
    assert passes["status"] == "ok" and passes["figures"]["answer"] == 42
    assert results["packages"]["torch"] and results["processor"] and results["cores"]
    said = capsys.readouterr().out
    assert "1 ok, 4 failed, 1 timed out, 0 not begun, 1 skipped" in said
    table = said.split("\n\n")[1].splitlines()  # a line of each again, in order, errors with it
    for found, line in zip(UNWELL, table, strict=False):
        assert found.name in line and (errors[found.name] or "answer 42") in line
    assert said.count(" is_wrong ") == 2


def test_a_check_that_needs_more_gpus_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = run_checks([check("passes", gpus=2)], "cuda", 1, tmp_path, whole_s=60.0)
    assert (found.status, found.error) == ("skipped", "needs 2 GPUs")
    assert "skipped   passes" in capsys.readouterr().out
    # a stand-in needs none
    assert run_check(check("passes", gpus=2), "cpu", 0, tmp_path / "cpu", 30.0).status == "ok"


def test_a_check_that_is_not_done_in_time_is_told_from_one_that_failed_and_is_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_runner, "GRACE_S", 0.5)
    monkeypatch.setattr(check_runner, "ROOT", tmp_path)
    hung, late = run_checks([check("hangs"), check("passes")], "cpu", 0, tmp_path, whole_s=1.0)
    assert (hung.status, hung.error) == ("timed out", "not done within 1 s")
    assert (late.status, late.error) == ("not begun", "the checks before it took 1 s")
    out = ["--out", str(tmp_path / "results.json")]
    assert main(out, [check("hangs", limit_s=0.1)]) == 1


def test_checks_are_chosen_by_name_or_by_what_it_begins_with() -> None:
    names = [check.name for check in select(["attention"], CHECKS)]
    assert names == ["attention.bfloat16", "attention.float16", "attention.float32"]
    assert [check.name for check in select(["training.bf16"], CHECKS)] == ["training.bf16"]
    assert len({check.name for check in CHECKS}) == len(select([], CHECKS))
    with pytest.raises(ValueError, match="--only atten: there is no such check, only device, "):
        select(["atten"], CHECKS)


def spoilt(function: str, folder: Path) -> str | None:
    """What a check says of code that is spoilt, with its stand-in."""
    found = run_check(Check(function, "", f"spoilt_checks:{function}", 0), "cpu", 0, folder, 500.0)
    assert found.status == "failed", found.line
    return found.error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_staging_fails_if_the_optimizer_does_not_wait_for_the_copy(tmp_path: Path) -> None:
    error = spoilt("staging", tmp_path / "spoilt")
    assert error is not None and "the optimizer waited 0.000 s" in error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_update_fails_if_the_service_loads_nothing(tmp_path: Path) -> None:
    error = spoilt("update", tmp_path / "spoilt")
    assert error is not None and re.search(r"disk: .* nats.*distributed: .* nats", error)


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_S["cpu"] + 60)
def test_without_a_gpu_every_check_passes_with_its_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "results.json"
    status = main(["--out", str(file)])
    results = json.loads(file.read_text())
    failed = {f["name"]: f["error"] for f in results["checks"] if f["status"] != "ok"}
    if "SGLANG_COMMAND" not in os.environ:  # as tests/run_sglang.sh sets it
        for name in ("sglang.contract", "sglang.families"):
            assert "needs SGLang: " in failed.pop(name)
    assert failed == {} and status == 0
    assert [found["name"] for found in results["checks"]] == [check.name for check in CHECKS]
    assert all(f["figures"] for f in results["checks"] if f["status"] == "ok")
    assert (results["device"], results["gpus"]) == ("cpu", [])
