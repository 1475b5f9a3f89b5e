"""Small training cases, and what an arrangement of processes makes of them.

A case is a model, rows and a loss. `run` trains it for two steps on a mesh and returns all that
must not depend on the mesh.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from tiny import (
    VOCABULARY,
    linear_rows,
    make_row,
    pair_row,
    random_model,
    sequences_of,
    tiny_model,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import (
    ApertusConfig,
    AutoModelForTokenClassification,
    Glm4MoeConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from agentrl.configs import (
    ComputeConfig,
    CriticConfig,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from agentrl.configs.preferences import PreferenceConfig
from agentrl.databases.documents import DBRecordData
from agentrl.training.data.planner import assign_rows
from agentrl.training.model.lora import add_adapter
from agentrl.training.parallel import Mesh
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import PreferenceStatistics, StepStatistics

STEPS = 2
LOSS = LossConfig(token_level_loss=False, log_entropy=True)
# clipped: the gradient norm, which is above 1 in all cases, scales every gradient
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.01, max_grad_norm=1.0)

CHAINS = linear_rows(7)
TREES = [
    make_row("bushy", 20, [(0, 10, -1), (10, 19, 0), (19, 24, 1), (24, 31, 1), (31, 37, 0)]),
    make_row("deep", 21, [(0, 9, -1), (9, 10, 0), (10, 19, 1), (19, 31, 0)]),
    *linear_rows(3),
    # more than a micro-batch on one prompt, which is computed once for several
    *(make_row(f"sibling-{n}", 22, [(0, 90 + 3 * n, -1)], prompt=80) for n in range(4)),
]
# Pairs on prompts of their own, on one that several pairs share, and one that no micro-batch holds.
PAIRS = [
    *(pair_row(f"pair-{n}", 30 + n, 12, 8 + 3 * n, 20 - 4 * n) for n in range(3)),
    *(pair_row(f"same-{n}", 40, 60, 9 + n, 11) for n in range(2)),
    pair_row("long", 50, 50, 70, 66),
]


@dataclass(frozen=True)
class Case:
    """What is trained."""

    model: Callable[[], PreTrainedModel]
    rows: list[DBRecordData]
    loss: LossConfig = LOSS
    gradient_checkpointing: bool = False
    offload: bool = False  # parameters and activations
    lora: bool = False
    critic: CriticConfig | None = None
    preference: PreferenceConfig | None = None
    reference: bool = False  # of its own, beside the policy

    @property
    def config(self) -> LearnerConfig:
        compute = ComputeConfig(
            gradient_checkpointing=self.gradient_checkpointing,
            activation_offloading=self.offload,
            param_offload=self.offload,
            micro_batch_tokens=96,
            loss_seq_chunk_size=32,
        )
        critic = self.critic or CriticConfig()
        return LearnerConfig(compute, self.loss, OPTIMIZER, critic, preference=self.preference)


@dataclass(frozen=True)
class Outcome:
    """What came of it, on every rank the same."""

    statistics: list[dict[str, float]]  # by step
    gradients: dict[str, Tensor]  # of the first step, clipped, whole
    weights: dict[str, Tensor]  # after the last step, whole
    logprobs: dict[int, Tensor]  # kept in the last step, of each row's trained tokens


_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "initializer_range": 0.2,
}  # fmt: skip


def _qwen2() -> PreTrainedModel:
    return random_model(Qwen2Config(**_SIZES, tie_word_embeddings=True))


def _llama() -> PreTrainedModel:
    return random_model(LlamaConfig(**_SIZES, head_dim=8))


def _qwen3_moe() -> PreTrainedModel:
    return random_model(
        Qwen3MoeConfig(
            **_SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            norm_topk_prob=True,
        )
    )  # fmt: skip


# The plans of these leave out modules that each process of tensor parallelism has whole and applies
# to its own heads or units.
def _glm4_moe() -> PreTrainedModel:
    return random_model(
        Glm4MoeConfig(
            **_SIZES, head_dim=8, use_qk_norm=True, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, first_k_dense_replace=1, n_group=1, topk_group=1,
        )
    )  # fmt: skip


def _phi() -> PreTrainedModel:
    # All dimensions turn: a key's bias in another would have no gradient but rounding.
    sizes = {**_SIZES, "num_key_value_heads": 4, "partial_rotary_factor": 1.0}
    return random_model(PhiConfig(**sizes, qk_layernorm=True))


def _apertus() -> PreTrainedModel:
    return random_model(ApertusConfig(**_SIZES))


def _critic(config: PreTrainedConfig) -> PreTrainedModel:
    """A critic of the same architecture, with opinions of its own from the start."""
    torch.manual_seed(4)
    config = copy.deepcopy(config)
    config.num_labels = 1
    return AutoModelForTokenClassification.from_config(config, dtype=torch.float32)


# Losses of whole sequences and of the whole batch; ranges so wide that gradients are left.
GSPO = LossConfig(
    loss_calculator="GSPO",
    epsilon=0.9,
    clip_ratio_high=30.0,
    skip_length_normalization=True,
    proximal_policy="behaviour",
)
KL_COV = LossConfig(loss_calculator="KL-Cov", kl_cov_ratio=0.1)
PPO = LossConfig(loss_calculator="PPO")
DPO = LossConfig(beta=0.3)
PREFERENCE = PreferenceConfig("sppo_hard", beta=DPO.beta)  # both sides of a pair by themselves
CRITIC = CriticConfig(critic_learning_rate=1e-2, gae_lambda=0.9, critic_updates=2, value_clip=0.1)


CASES = {
    "chains": Case(tiny_model, CHAINS),
    "trees": Case(tiny_model, TREES, gradient_checkpointing=True),
    # a pass over a prefix has no gradient of this head
    "untied": Case(partial(tiny_model, tied=False), TREES),
    "qwen2": Case(_qwen2, CHAINS, LossConfig()),
    "llama": Case(_llama, TREES),
    "qwen3_moe": Case(_qwen3_moe, TREES, gradient_checkpointing=True),
    "glm4_moe": Case(_glm4_moe, TREES),
    "phi": Case(_phi, TREES, gradient_checkpointing=True),
    "apertus": Case(_apertus, TREES),
    "phi_ppo": Case(_phi, TREES, PPO, critic=CRITIC),
    "offload": Case(tiny_model, TREES, gradient_checkpointing=True, offload=True),
    "offload_moe": Case(_qwen3_moe, CHAINS, gradient_checkpointing=True, offload=True),
    "lora": Case(tiny_model, TREES, gradient_checkpointing=True, lora=True),
    "entropy": Case(tiny_model, TREES, LossConfig(entropy_coef=0.3)),
    "gspo": Case(tiny_model, TREES, GSPO),
    "kl_cov": Case(tiny_model, TREES, KL_COV),
    "ppo": Case(tiny_model, TREES, PPO, gradient_checkpointing=True, critic=CRITIC),
    "dpo": Case(tiny_model, PAIRS, DPO, preference=PREFERENCE, reference=True),
    "dpo_lora": Case(tiny_model, PAIRS, DPO, lora=True, preference=PREFERENCE),
}


def run(case: Case, mesh: Mesh) -> Outcome:
    """Train the case. Collective over all processes of `mesh`."""
    model = case.model()
    if case.lora:
        torch.manual_seed(1)
        add_adapter(model, LoraConfig(lora_rank=4, lora_alpha=64), frozen_dtype=torch.float32)
    with TemporaryDirectory() as own:
        (folder,) = everywhere = [own]
        if case.critic or case.reference:
            dist.broadcast_object_list(everywhere, src=0)
            (folder,) = everywhere
            beside = _critic(model.config) if case.critic else tiny_model(seed=5)
            beside.save_pretrained(folder)  # which rank 0 does
            dist.barrier()
        learner = Learner(
            model,
            mesh,
            case.config,
            STEPS,
            reference=ModelConfig(folder) if case.reference else None,
            value_start=ModelConfig(folder) if case.critic else None,
            keeps_logprobs=True,
        )
        dist.barrier()  # all have read it
    gradients: list[dict[str, Tensor]] = []

    def keep(optimizer: Optimizer, args: object, kwargs: object) -> None:
        gradients.append(
            {
                name: _whole(parameter.grad)
                for name, parameter in learner.model.named_parameters()
                if parameter.grad is not None
            }
        )

    learner.optimizer.register_step_pre_hook(keep)
    mine = assign_rows([row.cost for row in case.rows], mesh.dp_size)[mesh.dp_rank]
    statistics = []
    for step in range(STEPS):
        taken = learner.step([sequences_of(case.rows[index], step) for index in mine])
        statistics.append(
            {
                "loss": taken.loss,
                "grad_norm": taken.grad_norm,
                "entropy": taken.entropy or 0.0,
                "ratio_mean": taken.ratio_mean,
                "n_train_tokens": taken.n_train_tokens,
                "value_loss": taken.value_loss or 0.0,
                "explained_variance": taken.explained_variance or 0.0,
                "critic_grad_norm": taken.critic_grad_norm or 0.0,
                # An adapter starts at the reference, where rewards are rounding.
                **(_rewards(taken) if case.reference else {}),
            }
        )
    weights = {name: _whole(parameter) for name, parameter in learner.model.named_parameters()}
    if learner.critic is not None:
        critic = learner.critic.model.named_parameters()
        weights |= {f"critic.{name}": _whole(parameter) for name, parameter in critic}
    for name, weight in weights.items():
        assert _is_same_everywhere(weight), f"processes have different weights of {name}"
    return Outcome(statistics, gradients[0], weights, _logprobs(learner, mine))


def _logprobs(learner: Learner, mine: Sequence[int]) -> dict[int, Tensor]:
    """Those that were kept, then the entropies, of all ranks; each row is one process's to tell."""
    own = zip(mine, learner.kept_tokens, strict=True) if learner.mesh.is_first_of_rows else ()
    told: list[dict[int, Tensor]] = [{}] * dist.get_world_size()
    ours: dict[int, Tensor] = {}
    for row, kept in own:
        columns = [kept.logprobs, *([] if kept.entropies is None else [kept.entropies])]
        ours[row] = torch.cat([torch.from_numpy(column) for column in columns])
    dist.all_gather_object(told, ours)
    assert sum(map(len, told)) == len({row for of_rank in told for row in of_rank})
    return {row: values for of_rank in told for row, values in of_rank.items()}


def _rewards(taken: StepStatistics) -> Mapping[str, float]:
    assert isinstance(taken, PreferenceStatistics)
    return taken.rewards


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def _is_same_everywhere(whole: Tensor) -> bool:
    """Whether all processes have the same values. Collective."""
    first = whole.clone()
    dist.broadcast(first, src=0)
    differing = torch.tensor(int(not torch.equal(first, whole)))
    dist.all_reduce(differing)
    return not differing


# Arrangements by number of processes: the flags, and the cases trained on it.
_DENSE = ("chains", "trees", "qwen2", "llama")
_ALL = (*_DENSE, "qwen3_moe")
_MOE = ("qwen3_moe",)
_FORGOTTEN = ("glm4_moe", "phi", "apertus", "phi_ppo")
_WIDE = ("gspo", "kl_cov", "ppo", "dpo")
ARRANGEMENTS: dict[int, dict[str, tuple[ParallelConfig, tuple[str, ...]]]] = {
    2: {
        "dp2": (ParallelConfig(), (*_ALL, *_WIDE)),
        "replicate2": (ParallelConfig(dp_replicate_size=2), ("trees", "untied")),
        "tp2": (
            ParallelConfig(tp_size=2),
            (*_ALL, *_FORGOTTEN, "ppo", "dpo", "offload", "entropy"),
        ),
        "ulysses2": (ParallelConfig(cp_size=2), (*_ALL, *_WIDE, "offload", "lora", "dpo_lora")),
        "allgather2": (ParallelConfig(cp_size=2, cp_mode="allgather"), (*_ALL, "ppo")),
        "ep2": (ParallelConfig(ep_size=2), (*_MOE, "offload_moe")),
        "tp2_ep2": (ParallelConfig(tp_size=2, ep_size=2), _MOE),
        "ulysses2_ep2": (ParallelConfig(cp_size=2, ep_size=2), _MOE),
    },
    4: {
        "replicate2_shard2": (ParallelConfig(dp_replicate_size=2), ("trees", "qwen3_moe")),
        "shard2_tp2": (ParallelConfig(tp_size=2), ("trees", "qwen2", "qwen3_moe")),
        "shard2_allgather2": (ParallelConfig(cp_size=2, cp_mode="allgather"), ("trees", "llama")),
        "replicate2_ulysses2": (ParallelConfig(dp_replicate_size=2, cp_size=2), ("trees",)),
        "ulysses4": (ParallelConfig(cp_size=4), ("trees",)),
        "ulysses2_tp2": (ParallelConfig(cp_size=2, tp_size=2), ("trees", "qwen3_moe")),
        "shard2_tp2_ep2": (ParallelConfig(tp_size=2, ep_size=2), _MOE),
        "shard2_tp2_ep4": (ParallelConfig(tp_size=2, ep_size=4), _MOE),
        "shard4_ep2": (ParallelConfig(ep_size=2), _MOE),
        "replicate2_shard2_ep2": (ParallelConfig(dp_replicate_size=2, ep_size=2), _MOE),
    },
    8: {
        "shard2_ulysses2_tp2": (
            ParallelConfig(cp_size=2, tp_size=2), ("chains", "trees", "llama", *_WIDE),
        ),
        "shard2_allgather2_tp2": (
            ParallelConfig(cp_size=2, tp_size=2, cp_mode="allgather"), ("trees",),
        ),
        "shard2_ulysses2_tp2_ep4": (ParallelConfig(cp_size=2, tp_size=2, ep_size=4), _MOE),
        "replicate2_ulysses2_tp2_ep2": (
            ParallelConfig(dp_replicate_size=2, cp_size=2, tp_size=2, ep_size=2), _MOE,
        ),
    },
}  # fmt: skip
