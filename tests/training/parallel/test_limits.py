"""How processes are divided by the flags, and what is refused before anything is loaded."""

import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from parallel_cases import CASES
from tiny import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, JetMoeConfig

from agentrl.configs import ComputeConfig, ConfigError, ParallelConfig, parse_config
from agentrl.training.parallel import ParallelSizes, check_degrees, make_mesh
from agentrl.training.parallel.apply import parallelise

DEGREES = st.sampled_from([1, 2, 3, 4])


@given(DEGREES, DEGREES, DEGREES, DEGREES, DEGREES)
def test_every_process_has_one_place_and_experts_fill_a_replica(
    replicate: int, shard: int, cp: int, tp: int, ep: int
) -> None:
    processes = replicate * shard * cp * tp
    config = ParallelConfig(tp_size=tp, cp_size=cp, dp_replicate_size=replicate, ep_size=ep)
    if (shard * cp * tp) % ep or (ep > 1 and ep % tp):
        with pytest.raises(ConfigError, match="--ep_size"):
            ParallelSizes.of(config, processes)
        return
    sizes = ParallelSizes.of(config, processes)
    assert (sizes.processes, sizes.dp_shard, sizes.dp) == (processes, shard, replicate * shard)
    assert sizes.dp_replicate * sizes.efsdp * sizes.ep == processes


def test_processes_that_the_degrees_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 processes were launched, which is no multiple of 4"):
        ParallelSizes.of(ParallelConfig(tp_size=2, cp_size=2), 6)


@pytest.mark.parametrize(
    ("sizes", "cp_mode", "message"),
    [
        (ParallelSizes(tp=3), "ulysses", "does not divide the model's 4 attention heads"),
        (ParallelSizes(tp=4), "ulysses", "does not divide the model's 2 key and value heads"),
        (ParallelSizes(cp=3), "ulysses", "4 attention heads of a process"),
        (ParallelSizes(cp=4, tp=2), "ulysses", "2 attention heads of a process"),
        (ParallelSizes(ep=2), "ulysses", "no plan for spreading experts"),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused(
    sizes: ParallelSizes, cp_mode: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_degrees(tiny_model(), sizes, cp_mode)


def test_gathered_keys_need_no_particular_number_of_heads() -> None:
    check_degrees(tiny_model(), ParallelSizes(cp=3), "allgather")


def test_experts_are_spread_evenly_or_not_at_all() -> None:
    moe = CASES["qwen3_moe"].model()
    check_degrees(moe, ParallelSizes(ep=4), "ulysses")
    with pytest.raises(ConfigError, match="does not divide the model's 4 experts"):
        check_degrees(moe, ParallelSizes(ep=3), "ulysses")


def test_a_model_without_a_plan_has_no_tensor_parallelism() -> None:
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=64)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="gpt2 has no plan for tensor parallelism"):
        check_degrees(model, ParallelSizes(tp=2), "ulysses")


def test_a_model_that_cannot_attend_over_trees_has_no_context_parallelism() -> None:
    config = BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=VOCABULARY)
    with pytest.raises(ConfigError, match=r"made of tree attention.*not exchangeable"):
        check_degrees(AutoModelForCausalLM.from_config(config), ParallelSizes(cp=2), "allgather")


def test_a_model_without_activation_checkpointing_is_refused_with_the_flag() -> None:
    config = JetMoeConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_key_value_heads=2,
        kv_channels=8, vocab_size=VOCABULARY, num_local_experts=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="--gradient_checkpointing: JetMoeForCausalLM has none"):
        parallelise(
            model, make_mesh(Accelerator(cpu=True)), ComputeConfig(gradient_checkpointing=True)
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pp_size", "2"], "no pipeline parallelism"),
        (["--cp_mode", "ring"], "known: ulysses, allgather"),
        (["--tp_size", "0"], "must be at least 1"),
    ],
)
def test_flags_of_what_there_is_not_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(flags)
