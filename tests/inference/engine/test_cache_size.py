"""How large the KV cache of the local engine is."""

import pytest

from agentrl.inference.engine.model_runner import cache_bytes_within


@pytest.mark.parametrize(
    ("at_start", "now", "fraction", "size"),
    [
        (80, 60, None, 15),  # a quarter of what the weights leave
        (80, 60, 0.5, 20),  # 40 for weights and cache
        (80, 30, 0.5, 0),  # the weights alone are more
        (80, 10, 0.99, 9),
    ],
)
def test_the_cache_is_what_the_weights_leave_of_the_share(
    at_start: int, now: int, fraction: float | None, size: int
) -> None:
    assert cache_bytes_within(at_start, now, fraction) == size
