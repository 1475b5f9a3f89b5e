"""Which flags may change, as the docs' table and the code's have it."""

import re
from pathlib import Path

from agentrl.configs.flag import FlagClass
from agentrl.configs.flags import FLAGS
from agentrl.configs.run_flags import class_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "checkpoints.md"
ROWS = {
    "of the data": FlagClass.DATA,
    "of the sampling": FlagClass.SAMPLING,
    "fixed": FlagClass.FIXED,
    "of a process": FlagClass.OWN,
    "of the training": FlagClass.TRAINING,
}


def test_the_docs_name_every_flag_in_the_row_of_its_class() -> None:
    rows = re.findall(r"^\| ([a-z ]+): (`--.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert [title for title, _ in rows] == list(ROWS)
    named = {name: ROWS[title] for title, cell in rows for name in re.findall(r"`--(\w+)`", cell)}
    assert named.keys() <= set(FLAGS), "run `python scripts/flags_page.py`"
    # "and all others" stands in the row of the training
    said = {name: named.get(name, FlagClass.TRAINING) for name in FLAGS}
    assert said == {name: class_of(name) for name in FLAGS}, "run `python scripts/flags_page.py`"
