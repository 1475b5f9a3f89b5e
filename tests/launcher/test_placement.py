"""Which GPUs train and which serve: properties of every plan, and plans of known models."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed_models import LARGE, MIDDLE, SMALL

from agentrl.configs import ConfigError
from agentrl.configs.parsing import Layer, config_of, read_flags
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.gpu_plan import asked_of, place_or_refuse, plan_lines
from agentrl.launcher.inventory import GIB, Gpu, Inventory, described
from agentrl.launcher.placement import RELEASED, USABLE, Asked, ModelSizes, Placement, place
from agentrl.training.model.memory_model import MemorySetup

BF16 = MemorySetup(tokens=1, bf16=True)
ASKED = Asked(tokens=16384, setup=BF16)

asks = st.builds(
    Asked,
    tokens=st.sampled_from((1024, 16384, 65536)),
    setup=st.just(BF16),
    tp=st.sampled_from((None, None, 1, 2, 4)),
    cp=st.sampled_from((None, None, 2)),
    micro_batch_tokens=st.sampled_from((None, 4096, 50000)),
    checkpointing=st.sampled_from((None, True, False)),
    models=st.sampled_from((1, 2)),
    reference=st.booleans(),
    trainers=st.sampled_from((None, None, 1, 2, 4)),
    serving=st.sampled_from((None, None, 1, 3, 4)),
    services=st.sampled_from((None, None, 0, 1, 2)),
    inf_tp=st.sampled_from((None, None, 1, 2)),
    inf_mem_ratio=st.sampled_from((None, None, 0.3)),
    in_turns=st.sampled_from((None, True, False)),
    reachable=st.booleans(),
)
inventories = st.builds(
    lambda machines, gpus, gib: described(f"{machines}x{gpus}x{gib}"),
    st.integers(1, 2),
    st.integers(1, 8),
    st.sampled_from((16, 24, 48, 80, 141)),
)
models = st.sampled_from((SMALL, MIDDLE, LARGE))


def memory_of_a_gpu(plan: Placement, gpu: int) -> float:
    """Bytes that trainer and service may use at once on a GPU, between steps if in turns."""
    serves = any(gpu in service for service in plan.service_gpus)
    trains = plan.train.between if plan.in_turns and serves else plan.train.peak
    share = plan.serve.share * plan.inventory.free if plan.serve is not None and serves else 0
    return share + (trains if gpu in plan.train_gpus else 0)


@given(inventories, models, asks)
def test_a_plan_uses_or_names_every_gpu_and_keeps_within_its_memory(
    inventory: Inventory, model: ModelSizes, asked: Asked
) -> None:
    plan = place(inventory, model, asked)
    if plan is None:
        with pytest.raises(ConfigError, match="do not fit"):
            place_or_refuse(inventory, model, asked)
        return
    serving = [gpu for service in plan.service_gpus for gpu in service]
    assert len(serving) == len(set(serving)), "no two services have a GPU in common"
    shared = {*serving} & {*plan.train_gpus}
    side_by_side = asked.inf_mem_ratio and asked.trainers and asked.serving
    assert not shared or plan.in_turns or side_by_side
    everywhere = {*serving, *plan.train_gpus, *plan.idle_gpus}
    assert everywhere == {*range(len(inventory.gpus))}
    assert not plan.idle_gpus or any(line.startswith("idle: GPU") for line in plan_lines(plan))
    train = plan.train
    assert train.dp * train.tp * train.cp == train.gpus * inventory.machines
    assert train.gpus * inventory.machines % train.ep == 0
    for gpu in everywhere:
        assert memory_of_a_gpu(plan, gpu) <= USABLE * inventory.free


@given(inventories, models, asks)
def test_what_the_flags_ask_for_is_in_the_plan(
    inventory: Inventory, model: ModelSizes, asked: Asked
) -> None:
    plan = place(inventory, model, asked)
    if plan is None:
        return
    train, serve = plan.train, plan.serve
    for wanted, got in (
        (asked.tp, train.tp), (asked.cp, train.cp), (asked.trainers, train.gpus),
        (asked.checkpointing, train.checkpointing), (asked.micro_batch_tokens, train.tokens),
    ):  # fmt: skip
        assert wanted in (None, got)
    assert asked.micro_batch_tokens or train.tokens >= min(asked.tokens, 40960)
    assert (serve is None) == (asked.services == 0)
    if serve is not None:
        assert asked.services in (None, serve.count) and asked.inf_tp in (None, serve.tp)
        assert asked.inf_mem_ratio in (None, serve.share)
        assert asked.in_turns in (None, plan.in_turns)
        assert asked.serving is None or serve.count * serve.tp <= asked.serving


@given(inventories, models, asks, st.floats(1.0, 4.0))
def test_more_memory_never_makes_a_fit_into_a_refusal(
    inventory: Inventory, model: ModelSizes, asked: Asked, factor: float
) -> None:
    larger = tuple(replace(gpu, free=int(gpu.free * factor)) for gpu in inventory.gpus)
    if place(inventory, model, asked) is not None:
        assert place(replace(inventory, gpus=larger), model, asked) is not None


def test_eight_gpus_are_halved_and_none_is_in_two_parts() -> None:
    plan = place_or_refuse(described("8x80"), MIDDLE, ASKED)
    assert plan.train_gpus == (0, 1, 2, 3)
    assert plan.service_gpus == ((4,), (5,), (6,), (7,))
    assert not plan.idle_gpus and not plan.in_turns


def test_one_gpu_is_shared_in_turns_and_the_service_takes_what_the_trainer_leaves() -> None:
    plan = place_or_refuse(described("1x80"), SMALL, ASKED)
    assert plan.in_turns and plan.serve is not None
    assert 0.5 < plan.serve.share < USABLE
    # Service and trainer would not fit together at a resume, so that the service makes room first.
    train = plan.train
    assert plan.serve.share * plan.inventory.free + train.loaded > USABLE * plan.inventory.free
    assert train.between < train.loaded < train.peak <= USABLE * plan.inventory.free - RELEASED
    assert any(
        f"released before it loads (at a resume {train.loaded / GIB:.1f} GiB)" in line
        for line in plan_lines(plan)
    )


def test_a_refusal_names_what_would_fit_and_it_does() -> None:
    with pytest.raises(ConfigError) as refused:
        place_or_refuse(described("2x80"), MIDDLE, ASKED)
    said = str(refused.value)
    assert "2 GPUs with 80 GiB free" in said and "3 such GPUs would" in said
    assert place(described("3x80"), MIDDLE, ASKED)
    assert "--param_offload would" in said
    offloading = replace(ASKED, setup=replace(BF16, param_offload=True))
    assert place(described("2x80"), MIDDLE, offloading)


def test_a_host_with_too_little_memory_for_a_staged_checkpoint_is_refused() -> None:
    node = described("8x80")
    needed = place_or_refuse(node, MIDDLE, ASKED).host
    assert place(replace(node, host_bytes=needed), MIDDLE, ASKED)
    assert place(replace(node, host_bytes=needed - 1), MIDDLE, ASKED) is None


def test_a_refusal_for_host_memory_says_how_much_is_needed_and_what_needs_less() -> None:
    node = replace(described("8x80"), host_bytes=40 * GIB)
    needed = place_or_refuse(described("8x80"), MIDDLE, ASKED).host
    with pytest.raises(ConfigError) as refused:
        place_or_refuse(node, MIDDLE, ASKED)
    said = str(refused.value)
    assert f"{-(-needed // GIB)} GiB of host memory are needed, and 40 may be used" in said
    assert "do not fit" not in said and "5 machines of 8 such GPUs would" in said
    assert place(replace(node, machines=5), MIDDLE, ASKED)
    shape = MIDDLE.shape  # as with --lora_rank 32: 1.3% of a layer
    adapted = replace(shape, layer_trained=shape.layer_parameters * 13 // 1000, root_trained=0)
    assert "an adapter would" in said and place(node, replace(MIDDLE, shape=adapted), ASKED)
    offloading = replace(ASKED, setup=replace(BF16, param_offload=True))
    with pytest.raises(ConfigError, match=r"host memory are needed, .*--param_offload false would"):
        place_or_refuse(replace(described("2x80"), host_bytes=15 * GIB), SMALL, offloading)


def with_free(*gib: float) -> Inventory:
    return Inventory(
        tuple(Gpu(str(n), "H100", 80 * GIB, int(each * GIB)) for n, each in enumerate(gib))
    )


def test_a_gpu_with_less_free_memory_is_named_and_a_refusal_says_that_the_others_would_do() -> None:
    for free, left, out in (
        ((79,) * 7 + (0.5,), "0,1,2,3,4,5,6", "GPU 7"),
        ((2, 79, 79, 79, 79, 0.5, 79, 79), "1,2,3,4,6,7", "GPUs 0, 5"),
        ((79,) * 7 + (0,), "0,1,2,3,4,5,6", "GPU 7"),
    ):
        machine = with_free(*free)
        with pytest.raises(ConfigError) as refused:
            place_or_refuse(machine, MIDDLE, ASKED)
        assert f"CUDA_VISIBLE_DEVICES={left} would, which leaves out {out}" in str(refused.value)
        rest = tuple(gpu for gpu in machine.gpus if gpu.device in left.split(","))
        assert place(replace(machine, gpus=rest), MIDDLE, ASKED)
    little = replace(with_free(*(79,) * 7, 0.5), host_bytes=23 * GIB)
    with pytest.raises(ConfigError, match="leaves out GPU 7, with 123 GiB of host memory"):
        place_or_refuse(little, MIDDLE, ASKED)
    with pytest.raises(ConfigError) as refused:
        place_or_refuse(with_free(2, 0.5), MIDDLE, ASKED)
    assert "CUDA_VISIBLE_DEVICES" not in str(refused.value)
    said, *_ = plan_lines(place_or_refuse(with_free(*(79,) * 7, 39), MIDDLE, ASKED))
    assert said == (
        "8 GPUs with 39 GiB free (H100), because GPU 7 has no more and all get equal shares "
        "(others have up to 79 GiB)"
    )
    said, *_ = plan_lines(place_or_refuse(with_free(*(79,) * 7, 75), MIDDLE, ASKED))
    assert said == "8 GPUs with 75 GiB free (H100)"


def asked_by(environment: dict[str, str], gpus: str, *flags: str) -> Asked:
    values = read_flags(flags).values
    inventory = described(gpus)
    config = config_of({**Layer("", values).values})
    return asked_of(config, values, read_deployment(environment), inventory, bf16=True)


def test_flags_that_cannot_be_placed_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--gpus_for_inference 9: a machine has 8"):
        asked_by({}, "8x80", "--gpus_for_inference", "9")
    with pytest.raises(ConfigError, match="--gpus_for_inference 4 are more than the 8"):
        asked_by({"NUM_PROCESSES": "6"}, "8x80", "--gpus_for_inference", "4")
    beside = asked_by(
        {"NUM_PROCESSES": "8"}, "8x80", "--gpus_for_inference", "8", "--inf_mem_ratio", "0.3"
    )
    plan = place_or_refuse(described("8x80"), MIDDLE, beside)
    assert not plan.in_turns and plan.train.gpus == 8
    assert [gpu for service in plan.service_gpus for gpu in service] == [*range(8)]
    assert place(described("1x80"), SMALL, asked_by({}, "1x80", "--sync_sampling", "false")) is None


def test_services_of_further_machines_need_a_key_and_are_named_as_idle_without() -> None:
    plan = place_or_refuse(described("2x8x80"), MIDDLE, ASKED)
    assert plan.serves(0) and not plan.serves(1)
    assert any("of the other machines" in line and "key" in line for line in plan_lines(plan))
    in_turns = plan_lines(place_or_refuse(described("3x1x80"), MIDDLE, ASKED))
    assert not any("idle" in line for line in in_turns), "each GPU trains"
    assert any("no services on the other machines: they need a key" in line for line in in_turns)
    with_key = place_or_refuse(described("2x8x80"), MIDDLE, replace(ASKED, reachable=True))
    assert with_key.serves(1)
    assert not any(line.startswith("idle") for line in plan_lines(with_key))
