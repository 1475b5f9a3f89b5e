"""Weights that are published while training goes on, by two processes: see `gathering_worker`."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedRanks
from gathering_worker import COPY_S, TIMEOUT_S

HERE = Path(__file__).parent
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gathering")


@pytest.fixture(scope="module")
def found(out: Path) -> Found:
    """What each process found."""
    with pytest.MonkeyPatch.context() as environment:
        # glibc then gives freed memory back, so that the kernel's figures are those of tensors.
        environment.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        ranks = ForkedRanks(2, out / "log", [str(HERE / "gathering_worker.py"), str(out)])
        assert ranks.wait() == 0, (out / "log").read_text()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def log(out: Path, found: Found) -> str:
    """What the processes have written."""
    return (out / "log").read_text()


def test_published_weights_are_those_of_the_step_though_training_changes_them(
    found: Found,
) -> None:
    main, other = found
    assert "model.embed_tokens.weight" in main["published"] and not main["wrong"]
    assert not main["unchanged"], "the steps meanwhile changed every weight"
    assert not other["published"]


def test_training_goes_on_until_the_optimizer_needs_the_copy(found: Found) -> None:
    for each in found:
        assert each["begun_s"] < COPY_S / 2
        assert 0.1 < each["waited_s"] < COPY_S + 0.5


def test_no_process_but_the_first_takes_more_than_its_part(found: Found) -> None:
    main, other = found
    assert main["size"] > 8e6
    # In float32 the largest weight alone takes twice the size of all that is published.
    assert other["peak"] < 0.7 * main["size"]
    assert main["peak"] < 1.7 * main["size"]


def test_a_process_that_cannot_copy_says_why_at_once(found: Found, log: str) -> None:
    main, other = found
    assert "process 1 of the trainer could not copy its part" in main["failure"]
    assert "(MemoryError: no pinned memory is left)" in main["failure"]
    assert main["failed_s"] < TIMEOUT_S
    assert other["failure"] == "no pinned memory is left"
    assert "this process could not copy its part of the weights: no pinned memory is left" in log


def test_a_process_that_sends_nothing_is_named(found: Found) -> None:
    main, _ = found
    assert "process 1 of the trainer did not send its part of the weights" in main["said"]
    assert f"within {TIMEOUT_S:g} s" in main["said"]
