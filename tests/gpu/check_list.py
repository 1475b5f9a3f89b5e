"""The checks of the first hour on a GPU, in the order in which they run.

Cheap and basic ones come first, so that what fails later is explained by what failed before. Each
names a function of a file of this folder, which runs in a process of its own (`check_process`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One check, by name."""

    name: str
    shows: str  # in words, for `--list`
    function: str  # `module:function`, which takes a `Machine` and `Figures` and raises if it fails
    limit_s: float  # from start to end, on a GPU; a check that takes longer has timed out
    gpus: int = 1  # that it needs; on a CPU its stand-in runs without
    environment: Mapping[str, str] = field(default_factory=dict)


CHECKS = (
    Check("device", "torch computes on the device: matrix product, in TFLOP/s",
          "device_checks:matrix_product", 60),
    Check("attention.bfloat16", "tree attention in bfloat16 against the definition",
          "attention_checks:bfloat16", 90),
    Check("attention.float16", "tree attention in float16 against the definition",
          "attention_checks:float16", 90),
    Check("attention.float32", "tree attention in float32 against the definition",
          "attention_checks:float32", 120),
    Check("training.bf16", "a step in bfloat16 against the same step in float32",
          "training_checks:bf16_against_float32", 120),
    Check("training.compile", "a step with --compile against the same step without",
          "training_checks:compiled_against_plain", 180),
    Check("state.staging", "weights are copied for publication while a step changes them",
          "state_checks:staging", 90),
    Check("state.offload", "the trainer's state goes to the host and back, and the device is free",
          "state_checks:offload", 90),
    Check("state.checkpoint", "a checkpoint is saved from the host, and resumed from",
          "state_checks:checkpoint", 120),
    Check("memory.model", "the memory model against measured peaks, by each way of saving memory",
          "memory_model_check:peaks", 150, environment={"MALLOC_MMAP_THRESHOLD_": "65536"}),
    Check("throughput.16k", "tokens/s and MFU of a 0.6B model at 16k tokens, beside prime-rl's",
          "throughput_checks:tokens_16k", 90),
    Check("throughput.65k", "the same at 65k tokens",
          "throughput_checks:tokens_65k", 120),
    Check("update.nccl", "weights broadcast between two processes come bit for bit, in GB/s",
          "weight_update_check:broadcast", 120, gpus=2),
    Check("training.two_processes", "a step over two processes against the same step of one",
          "ranks_check:two_processes", 180, gpus=2),
    Check("service.mismatch", "KL between a service's logprobs and the trainer's, in bfloat16",
          "service_checks:mismatch", 180),
    Check("service.update", "a service's weights by disk, tensor and distributed, in seconds",
          "service_checks:update", 180),
    Check("service.memory", "memory that service and trainer give back to each other",
          "service_checks:memory", 180),
    Check("sglang.contract", "what AgentRL relies on of SGLang, with its kernels for GPUs",
          "contract_check:contract", 300),
    Check("sglang.families", "published weights of DeepSeek, gpt-oss and others, by every way",
          "contract_check:families", 300),
)  # fmt: skip
