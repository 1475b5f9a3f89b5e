"""The three scripts of the original AgentRL, rebuilt from what its users bring.

What a user fills in is filled in here: a tiny model, this machine's MongoDB and tool manager, few
steps of few rows, the CPU, and one GPU's tensor parallelism. All else is as it stands there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ALL = """
    --model_name_or_path "$MODEL" --trainer QwenTrainer
    --db_connection_string "$DB/$RUN_NAME?replicaSet=rs0" --seed 42 --run_name $RUN_NAME
    --report_to tensorboard --enable_sampling true --agent_config_path assets/agent_config.yml
    --mcp_manager_url "$MANAGER" --max_new_tokens 32768 --max_prompt_tokens 128768
    --num_generations {generations} --tool_call_parser qwen
    --preferred_sampling_params '{{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}}'
    --presence_penalty {presence} --frequency_penalty 0.0 --inf_tp_size 1 --inf_mem_ratio 0.8
    --max_concurrent_samples_per_process 4 --target_concurrency 3 --max_turns 200
    --repetition_early_stop_times 4 --enable_repetition_compress false
    --output_dir output/$RUN_NAME --train_file "$TASKS"
"""
TRAINING = """
    --cpu_ram_efficient_loading true --weight_decay 0.05 --optim_args 'beta1=0.9,beta2=0.98'
    --max_steps $MAX_STEPS --num_train_epochs 5 --adv_scaling 2.0 --max_tokens 131072
    --max_trained_count 1 --dataloader_drop_last true --dataloader_num_workers 1
    --max_grad_norm 1.0 --logging_steps 1 --learning_rate 2e-6 --warmup_steps 5
    --lr_scheduler_type cosine --bf16 --tp_size 1 --pp_size 1 --activation_offloading false
    --per_device_train_batch_size 1 --gradient_accumulation_steps $ROWS --eval_strategy no
    --eval_steps 5 --save_only_model true --save_steps 3 --dataloader_prefetch_factor 4
    --balance_sample true --accelerator_config '{{"split_batches":true}}'
    --pad_to_multiple_of 4096
"""
GRPO = "--token_level_loss true --loss_calculater GRPO"
MINIRL = """
    --token_level_loss false --loss_calculater MINIRL --strict_in_bound true
    --skip_length_normalization true
"""
EVALUATION = "--new_context discard_all"

HEAD = """#!/bin/bash
set -euo pipefail
RUN_NAME="$1"
mkdir -p logs/as
export TOKENIZERS_PARALLELISM=false
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo TORCH_DISTRIBUTED_BACKEND=nccl
export NCCL_TIMEOUT=14400000 NCCL_IB_DISABLE=0 NCCL_NET_GDR_LEVEL=2 NCCL_IB_HCA=mlx5
export TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS=1 MONITOR_INTERVAL=5
export TORCH_NCCL_TRACE_BUFFER_SIZE=1048576 LOG_LEVEL=debug
export SWANLAB_API_KEY=none SWANLAB_PROJECT=agentrl SWANLAB_WORKSPACE=mine

accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes=$NUM_PROCESSES \\
    --machine_rank=$MACHINE_RANK --main_process_ip=$MASTER_ADDR \\
    --main_process_port=$MASTER_PORT --num_machines=$NUM_MACHINES \\
"""


@dataclass(frozen=True)
class Script:
    """One of the scripts. `program`: what it launches; `kind`: of its log."""

    program: str
    flags: str
    values: Mapping[str, str]
    kind: str = "train"

    @property
    def text(self) -> str:
        """The shell script."""
        flags = " ".join(self.flags.format(**self.values).split())
        log = f"logs/as/${{RUN_NAME}}_{self.kind}_${{MACHINE_RANK}}.log"
        return f"{HEAD}    {self.program} {flags} \\\n    > {log} 2>&1\n"


SCRIPTS = {
    "grpo": Script("src/main.py", ALL + TRAINING + GRPO, {"generations": "8", "presence": "0.0"}),
    "minirl": Script(
        "src/main.py", ALL + TRAINING + MINIRL, {"generations": "8", "presence": "0.0"}
    ),
    "eval": Script(
        "src/sampling.py", ALL + EVALUATION, {"generations": "4", "presence": "1.0"}, "eval"
    ),
}
