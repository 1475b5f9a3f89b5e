"""The probe at the start: each model is trained in a form that is right for it, or not at all."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tiny import random_model
from transformers import (
    AttentionInterface,
    BertConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertDecoderConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentrl.configs import ComputeConfig, ConfigError, LearnerConfig, ModelConfig
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.batch import MicroBatch
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.batch_form import BatchForm, batch_form
from agentrl.training.model.logprobs import token_logprobs
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import Mesh, grad_norms, make_mesh
from agentrl.training.step.learner import Learner
from agentrl.training.step.probe import Verdict, probe
from agentrl.training.step.schedule import forget_passes, make_schedule, run_schedule

COMPUTE = ComputeConfig(micro_batch_tokens=400)
LONGEST = 1000  # tokens of the longest row that may come
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def longrope() -> PreTrainedConfig:
    """Frequencies of rows beyond 100 tokens are a third of those of shorter rows."""
    return Phi3Config(
        **SIZES, original_max_position_embeddings=100,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4, "original_max_position_embeddings": 100,
        },
    )  # fmt: skip


def llama4(floor_scale: int) -> PreTrainedConfig:
    """The second layer scales queries by their place in the line, from so many tokens on."""
    return Llama4TextConfig(
        **SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=4,
        attention_chunk_size=2000, no_rope_layers=[1, 0], floor_scale=floor_scale,
    )  # fmt: skip


TREE, PADDED, EQUAL = BatchForm.TREE, BatchForm.PADDED, BatchForm.EQUAL_LENGTHS
# By name: the model, the form and attention that the probe finds, and why no better one.
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], BatchForm, str, str]] = {
    "qwen3": (lambda: Qwen3Config(**SIZES, head_dim=8), TREE, "agentrl_tree", ""),
    "llama": (lambda: LlamaConfig(**SIZES), TREE, "agentrl_tree", ""),
    "opt": (
        lambda: OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32), TREE, "agentrl_tree", ""
    ),
    "latent_attention": (
        lambda: DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2,
            n_group=2, topk_group=1, moe_intermediate_size=24, first_k_dense_replace=1,
            q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
        ),
        TREE, "agentrl_tree", "",
    ),
    "logits_divided": (
        lambda: GraniteConfig(**SIZES, logits_scaling=4.0), TREE, "agentrl_tree", ""
    ),
    "logits_multiplied": (
        lambda: CohereConfig(**SIZES, logit_scale=0.25), TREE, "agentrl_tree", ""
    ),
    "head_multiplied": (
        lambda: FalconH1Config(
            **SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
            mamba_chunk_size=16, lm_head_multiplier=0.3,
        ),
        PADDED, "sdpa", "not exchangeable",
    ),
    "scores_and_logits_capped": (
        lambda: Gemma2Config(**SIZES, head_dim=8, layer_types=["full_attention"] * 2),
        PADDED, "eager", "a soft cap",
    ),
    "sinks": (
        lambda: GptOssConfig(
            **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
            layer_types=["full_attention"] * 2,
        ),
        PADDED, "eager", "sinks",
    ),
    "narrow_window": (
        lambda: Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16), PADDED, "sdpa", "window"
    ),
    "window_wider_than_the_probe": (
        lambda: MistralConfig(**SIZES, sliding_window=200), PADDED, "sdpa", "200 tokens at most"
    ),
    "chunks_wider_than_the_probe": (
        lambda: Llama4TextConfig(
            **SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=4,
            attention_chunk_size=200,
        ),
        PADDED, "sdpa", "200 tokens at most",
    ),
    "scaled_by_the_place_in_the_line": (
        lambda: llama4(floor_scale=150), PADDED, "sdpa", "place in the line beyond 149 tokens"
    ),
    "linear_attention": (
        lambda: Qwen3_5TextConfig(
            **SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        PADDED, "sdpa", "not exchangeable",
    ),
    "tree_not_passed_on": (lambda: NemotronConfig(**SIZES), PADDED, "sdpa", "not pass the tree"),
    "longrope": (longrope, EQUAL, "sdpa", "depend on the length of others in its pass"),
}  # fmt: skip


def mesh() -> Mesh:
    return make_mesh(Accelerator(cpu=True))


def prepared(config: PreTrainedConfig) -> PreTrainedModel:
    model = random_model(config, seed=0)
    prepare_model(model, mesh(), COMPUTE)
    return model


def probed(model: PreTrainedModel, longest: int = LONGEST) -> Verdict:
    return probe(model, mesh(), COMPUTE, longest, trees=True)


def rows() -> list[list[TrainingSequence]]:
    """Three siblings, of which one is beyond longrope's 100 tokens, and two of other prompts."""
    generator = np.random.default_rng(5)
    prompt = generator.integers(3, 64, 50)
    lines = [np.concatenate([prompt, generator.integers(3, 64, n)]) for n in (9, 30, 80)]
    lines += [generator.integers(3, 64, n) for n in (7, 70)]
    return [
        [
            TrainingSequence(
                TokenTree.line(ids, mask=np.arange(len(ids)) > len(ids) // 2, advantages=1.0),
                temperature=1.0,
                row_tokens=len(ids) - len(ids) // 2 - 1,
            )
        ]
        for ids in lines
    ]


def trained_logprobs(model: PreTrainedModel) -> dict[tuple[int, int], float]:
    """The logprobs that a step computes, by row and place."""
    found: dict[tuple[int, int], float] = {}

    def collect(number: int, batch: MicroBatch, logprobs: torch.Tensor) -> None:
        keys = zip(batch.sequence.tolist(), batch.place.tolist(), strict=True)
        found.update(zip(keys, logprobs[batch.prediction].tolist(), strict=True))

    with torch.no_grad():
        run_schedule(
            model,
            make_schedule(model, rows(), 400, 1, mesh()),
            lambda batch, prefix: token_logprobs(model, batch, 64, prefix=prefix)[0],
            collect,
        )
    return found


def own_logprobs(config: PreTrainedConfig) -> dict[tuple[int, int], float]:
    """By the unprepared model's own forward with eager attention, one row at a time."""
    model = random_model(config, seed=0).eval()
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    found: dict[tuple[int, int], float] = {}
    for number, [row] in enumerate(rows()):
        ids = torch.from_numpy(row.tokens["ids"]).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        every = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].tolist()
        found.update({(number, place): every[t - 1] for place, t in enumerate(row.trained)})
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_trained_in_the_cheapest_form_that_gives_its_own_logprobs(name: str) -> None:
    make, form, attention, reason = MODELS[name]
    model = prepared(make())
    verdict = probed(model)
    assert verdict.difference is not None, verdict.sentence
    assert (verdict.form, verdict.attention) == (form, attention), verdict.sentence
    assert batch_form(model) is form
    assert reason in verdict.sentence
    assert verdict.difference.nats < 1e-4
    trained, own = trained_logprobs(model), own_logprobs(make())
    assert trained.keys() == own.keys()
    assert max(abs(trained[key] - own[key]) for key in own) < 1e-4


def test_a_model_with_two_sets_of_frequencies_is_a_tree_if_no_row_needs_the_second() -> None:
    assert probed(prepared(longrope()), longest=100).form is TREE


def test_a_model_that_scales_by_the_place_in_the_line_is_a_tree_if_no_line_is_so_long() -> None:
    longest = max(400, COMPUTE.token_budget)
    assert probed(prepared(llama4(longest + 1)), longest=400).form is TREE
    long_lines = probed(prepared(llama4(longest)), longest=300)
    assert long_lines.form is PADDED
    assert f"a line may have {longest} (--max_tokens, --micro_batch_tokens)" in long_lines.sentence


def test_frequencies_that_remember_the_longest_row_so_far_are_refused_with_the_number() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    verdict = probed(prepared(LlamaConfig(**SIZES, rope_parameters=rope)))
    assert verdict.difference is None
    assert "depend on the rows before it, by 0.0" in verdict.sentence
    assert "if a row may have 1000 tokens (--max_tokens)" in verdict.sentence
    short = probed(prepared(LlamaConfig(**SIZES, rope_parameters=rope)), longest=256)
    assert short.form is TREE


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    model = prepared(LlamaConfig(**SIZES))
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> object:
        return original(self, hidden_states + hidden_states.mean(1, keepdim=True), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "forward", forward)
        verdict = probed(model)
    assert verdict.difference is None
    assert "depend on later tokens" in verdict.sentence


def test_a_model_whose_last_attention_is_not_that_of_the_last_number_is_no_tree() -> None:
    model = prepared(LlamaConfig(**SIZES))
    for layer, number in zip(model.model.layers, (1, 0), strict=True):
        layer.self_attn.layer_idx = number
    verdict = probed(model)
    assert verdict.form is PADDED
    assert "not as tree with agentrl_tree: logprobs differ" in verdict.sentence


def share(verdict: Verdict) -> float:
    """By how much of their norm gradients differ, as the verdict says."""
    return float(verdict.sentence.rpartition("gradients by ")[2].partition(" of")[0])


def test_a_model_with_a_wrong_gradient_is_refused_although_its_logprobs_are_right() -> None:
    model = prepared(LlamaConfig(**SIZES))

    def detach(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output.detach() if module.training else output  # the reference is no training

    model.model.layers[1].mlp.register_forward_hook(detach)
    verdict = probed(model)
    assert verdict.difference is None
    assert share(verdict) > 0.95, "of the weights that get none"


def test_a_small_error_of_a_gradient_is_refused_in_its_true_size() -> None:
    model = prepared(LlamaConfig(**SIZES))

    def weaken(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return 0.9 * output + 0.1 * output.detach() if module.training else output

    model.model.layers[-1].mlp.register_forward_hook(weaken)
    verdict = probed(model)
    assert verdict.difference is None
    assert 0.08 < share(verdict) < 0.2


def test_random_parts_of_a_model_that_have_no_known_name_are_refused() -> None:
    model = prepared(LlamaConfig(**SIZES))
    model.model.norm.register_forward_hook(lambda *_: _[2] + 0.1 * torch.randn_like(_[2]))
    verdict = probed(model)
    assert verdict.difference is None
    assert "nats" in verdict.sentence


def test_a_probe_leaves_no_gradient_and_the_mode_of_the_model() -> None:
    model = prepared(NemotronConfig(**SIZES)).eval()
    probed(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_a_pass_that_raises_leaves_no_gradient_and_no_trace_in_the_next_one() -> None:
    model = prepared(LlamaConfig(**SIZES))
    ids = torch.arange(3, 40)[None]

    def norm() -> float:
        forget_passes(model)
        model(input_ids=ids).logits.square().mean().backward()
        return float(grad_norms([list(model.parameters())])[0])

    expected = norm()
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        model(input_ids=ids)
    hook.remove()
    assert norm() == pytest.approx(expected, rel=1e-6)


def test_an_attention_that_the_user_names_is_refused_with_numbers_if_it_is_wrong() -> None:
    def half_the_scale(
        module: torch.nn.Module, *args: torch.Tensor, scaling: float, **kwargs: object
    ) -> object:
        return sdpa_attention_forward(module, *args, scaling=scaling / 2, **kwargs)

    AttentionInterface.register("half_the_scale", half_the_scale)
    wanted = ModelConfig(attention_implementation="half_the_scale")
    model = random_model(LlamaConfig(**SIZES), seed=0)
    model.set_attn_implementation("half_the_scale")
    with pytest.raises(ConfigError, match=r"with half_the_scale: logprobs differ by [0-9.]+ nats"):
        Learner(model, mesh(), LearnerConfig(COMPUTE, model=wanted), 1)


def test_a_head_that_is_not_behind_the_base_model_is_refused_in_a_sentence() -> None:
    verdict = probed(prepared(ModernBertDecoderConfig(**SIZES)))
    assert verdict.difference is None
    assert "does not compute logits from given hidden states" in verdict.sentence


def test_bert_which_shares_its_embeddings_with_its_head_across_units_is_refused() -> None:
    verdict = probed(prepared(BertConfig(**SIZES)))
    assert verdict.difference is None
    assert "Parameter 'bert.embeddings" in verdict.sentence
