"""What is imported much is imported without garbage collection."""

import gc

import pytest

from agentrl.importing import importing


def test_nothing_is_collected_while_a_process_imports_and_its_modules_are_never_visited() -> None:
    frozen = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[number] for number in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + len(made)
    finally:
        gc.unfreeze()


def test_a_failed_import_leaves_the_collector_as_it_was() -> None:
    try:
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
        gc.disable()
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
