"""How long a model is, by what its config.json says, and what services tell of their context."""

from typing import Any

import pytest

from agentrl.inference.context import model_length, told_context


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 32768, "rope_scaling": None}, 32768),
        # Qwen2.5 with YaRN, as its page says: the stated length is that before the scaling.
        ({"max_position_embeddings": 32768, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        # Llama 3.1: the stated length is that after it.
        ({"max_position_embeddings": 131072, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
         131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2}}, 8192),
        # transformers 5: one for each kind of layers.
        ({"max_position_embeddings": 8192, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_type": "default"}}}, 65536),
        ({"n_ctx": 1024}, None),
    ],
)  # fmt: skip
def test_the_length_of_a_model_is_what_its_positions_reach(
    config: dict[str, Any], length: int | None
) -> None:
    assert model_length(config) == length


@pytest.mark.parametrize(
    ("refusal", "context"),
    [
        ("The input (2000 tokens) is longer than the model's context length (1024 tokens).", 1024),
        ("Requested token count exceeds the model's maximum context length of 1024 tokens. You "
         "requested a total of 5020 tokens: 20 tokens from the input messages and 5000", 1024),
        ("Input length (1020 tokens) exceeds the maximum allowed length (1018 tokens). Use a "
         "shorter input or enable --allow-auto-truncate.", 1024),
        ("This model's maximum context length is 4096 tokens. However, you requested 5000", 4096),
        ("temperature must be non-negative, got -1.0.", None),
    ],
)  # fmt: skip
def test_a_refusal_tells_the_context_that_was_too_short(refusal: str, context: int | None) -> None:
    assert told_context(f"http://a:1/generate answered 400: {refusal}") == context
