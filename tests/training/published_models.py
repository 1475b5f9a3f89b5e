"""Models that the pages have tables of, as configurations: nothing is fetched."""

from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

_QWEN3 = {"vocab_size": 151936, "head_dim": 128}
MODELS: dict[str, PreTrainedConfig] = {
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, vocab_size=151936,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True, vocab_size=151936,
    ),
    "Qwen3-0.6B": Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, tie_word_embeddings=True, **_QWEN3,
    ),
    "Qwen3-4B": Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True, **_QWEN3,
    ),
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False, **_QWEN3,
    ),
    "Qwen3-14B": Qwen3Config(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, tie_word_embeddings=False, **_QWEN3,
    ),
    "Qwen3-32B": Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, tie_word_embeddings=False, **_QWEN3,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False, **_QWEN3,
    ),
    "Qwen3-235B-A22B": Qwen3MoeConfig(
        hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False, **_QWEN3,
    ),
}  # fmt: skip
