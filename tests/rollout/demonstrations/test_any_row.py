"""Any row is read or refused with a sentence, whatever stands in its fields."""

import json
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.demonstrations.layouts import read_demonstration
from agentrl.rollout.demonstrations.preferences import read_preference

MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"content": st.sampled_from(["", "a", "b", None, ["a"]]), "id": st.integers(0, 2)},
)
VALUES = st.one_of(
    st.none(),
    st.integers(),
    st.sampled_from(["", "a", "a b", "a c"]),
    st.lists(MESSAGES, max_size=3),
    st.lists(MESSAGES, max_size=3).map(json.dumps),
    MESSAGES,
    st.lists(st.integers(), max_size=1),
)
ROWS = st.dictionaries(
    st.sampled_from(
        [
            "messages", "conversations", "prompt", "completion", "text", "chosen", "rejected",
            "question", "instruction", "input", "history", "query", "system", "system_prompt",
            "tools", "functions", "images", "train", "weight", "label",
        ]
    ),
    VALUES,
    max_size=5,
)  # fmt: skip


@given(ROWS)
def test_any_row_of_demonstrations_is_read_or_refused(row: dict[str, Any]) -> None:
    with suppress(ValueError):
        read_demonstration(row)


@given(ROWS, VALUES, VALUES)
def test_any_row_of_preferences_is_read_or_refused(
    row: dict[str, Any], chosen: Any, rejected: Any
) -> None:
    with suppress(ValueError):
        read_preference({**row, "chosen": chosen, "rejected": rejected})
