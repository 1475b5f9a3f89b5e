"""Attention of decoding rows of very different lengths, against the formula."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from agentrl.inference.engine.kv_cache import KVCache, PrefillChunk, attend_step, common_length

KV, GROUP, SIZE, CONTEXT = 2, 3, 8, 2048
CONFIG = Qwen3Config(
    num_hidden_layers=1, num_attention_heads=KV * GROUP, num_key_value_heads=KV, head_dim=SIZE
)


def test_each_row_attends_to_all_of_its_own_positions_and_no_others() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [20, 2000, 21, 19, 1500, 25, 18, 20]
    cache = KVCache(CONFIG, len(lengths) + 1, CONTEXT, torch.device("cpu"), torch.float32)
    cache._store.normal_(generator=generator)
    last = PrefillChunk(len(lengths), 30, 33)
    layout = cache.lay_out([length - 1 for length in lengths], [last])
    assert layout.apart == ((1, 2000), (4, 1500)) and layout.mask_B11L.shape[3] == 25
    tokens = len(lengths) + 3
    query = torch.randn(tokens, KV * GROUP, SIZE, generator=generator)
    keys, values = cache._store[0]
    attended = attend_step(query, keys, values, layout, 0.3)

    ends = [(row, length) for row, length in enumerate(lengths)]
    ends += [(last.row, end) for end in (31, 32, 33)]
    for token, (row, length) in enumerate(ends):
        for head in range(KV * GROUP):
            key, value = (part[row, head // GROUP, :length] for part in (keys, values))
            weights = (0.3 * key @ query[token, head]).softmax(0)
            ours = attended[token].view(KV * GROUP, SIZE)[head]
            torch.testing.assert_close(ours, weights @ value, atol=1e-5, rtol=1e-4)


def positions_read(lengths: list[int], common: int, call: int) -> int:
    return len(lengths) * common + sum(length + call for length in lengths if length > common)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=20), st.integers(0, 500))
def test_no_other_common_length_reads_fewer_positions(lengths: list[int], call: int) -> None:
    chosen = positions_read(lengths, common_length(lengths, call), call)
    assert chosen == min(positions_read(lengths, other, call) for other in lengths)


def test_one_long_row_does_not_make_the_others_long() -> None:
    assert common_length([200] * 63 + [8000], 256) == 200
    assert common_length([200] * 64, 256) == 200
    assert common_length([], 256) == 0
