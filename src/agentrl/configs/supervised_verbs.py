"""The command lines of `agentrl sft` and `agentrl dpo`, and of the processes that they launch."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence

from agentrl.configs.command_line import RUN_FLAGS_EPILOG, Parser, run_parser
from agentrl.configs.config import Config
from agentrl.configs.flags import flags_named, read_truth
from agentrl.configs.parsing import (
    Layer,
    config_of,
    in_brackets,
    in_force,
    layers_given,
    merged,
)
from agentrl.configs.preferences import LOSS_TYPES, PreferenceConfig
from agentrl.configs.secret_variables import flags_in_environment

# Flags of a run that `agentrl sft` has. Its checkpoints resume and are exported as a run's are.
SFT_FLAGS = flags_named(
    "run_name", "output_dir", "report_to", "change_data", "seed", "logging_steps",
    "chat_template_kwargs", "attention_implementation", "max_tokens", "num_train_epochs",
    "eval_steps", "lora_rank", "lora_alpha", "lora_target_modules", "learning_rate",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "lr_scheduler_type", "warmup_steps", "max_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "bf16", "fp32_head", "gradient_checkpointing",
    "activation_offloading", "param_offload", "compile", "micro_batch_tokens",
    "pad_to_multiple_of", "loss_seq_chunk_size", "tp_size", "cp_size", "cp_mode", "ep_size",
    "dp_replicate_size", "use_cpu", "save_steps", "save_total_limit", "resume_from_checkpoint",
)  # fmt: skip
# The same of `agentrl dpo`, which has a reference.
DPO_FLAGS = (*SFT_FLAGS, *flags_named("beta", "reference_model_name_or_path"))
SFT_PRESET = Layer(
    "agentrl sft",
    {
        "run_name": "sft",
        "loss_calculator": "CrossEntropy",
        "max_tokens": 8192,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 16,
    },
)
DPO_PRESET = Layer(
    "agentrl dpo",
    {
        "run_name": "dpo",
        "max_tokens": 8192,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 16,
        "beta": 0.1,
    },
)


def sft_parser() -> Parser:
    """The parser of `agentrl sft`."""
    parser = _parser(
        "agentrl sft",
        "Train a model on conversations, by the trainer's own step with the CrossEntropy loss.",
        train_file="conversations to train on: JSONL, JSON or Parquet",
        from_run="name of a run whose trajectories are trained on, with the tokens that it sampled",
        where="score>=1",
        eval_file="conversations whose loss is measured before the first step, every --eval_steps "
        "and at the end",
    )
    parser.add_run_flags(SFT_FLAGS, in_brackets(in_force([SFT_PRESET])))
    parser.add_familiar_flags()
    return parser


def dpo_parser() -> Parser:
    """The parser of `agentrl dpo`."""
    parser = _parser(
        "agentrl dpo",
        "Train a model on pairs of answers, by the trainer's own step with a preference loss.",
        train_file="prompts with a chosen and a rejected answer each: JSONL, JSON or Parquet",
        from_run="name of a run whose groups are trained on: the best trajectory of each against "
        "its worst, with the tokens that it sampled",
        where="all that are finished",
        eval_file="pairs whose loss, accuracy and margin are measured before the first step, every "
        "--eval_steps and at the end",
    )
    parser.add_argument(
        "--margin",
        metavar="X",
        type=float,
        help="smallest difference of score between best and worst of a group of --from_run, above "
        "0 (default: any)",
    )
    _add_preference(parser, "sigmoid")
    parser.add_run_flags(DPO_FLAGS, in_brackets(in_force([DPO_PRESET])))
    parser.add_familiar_flags()
    return parser


def _parser(
    prog: str, description: str, *, train_file: str, from_run: str, where: str, eval_file: str
) -> Parser:
    """A parser of a model and its rows; `where`: the default of `--where`, the others a help."""
    parser = Parser(
        prog,
        description,
        usage=f"{prog} --model DIR (--train_file FILE | --from_run RUN) [flags]",
        epilog=f"{RUN_FLAGS_EPILOG} NUM_PROCESSES and the other variables of the trainer's "
        "processes are as for a launch.",
    )
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="folder of the model to train (needed)"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--train_file", metavar="FILE", help=train_file)
    source.add_argument("--from_run", metavar="RUN", help=from_run)
    parser.add_argument(
        "--where",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="conditions that all trajectories of --from_run fulfil, as those of `agentrl show` "
        f"(default: {where})",
    )
    parser.add_argument("--eval_file", metavar="FILE", help=f"{eval_file} (default: none)")
    return parser


def _add_preference(parser: Parser, loss_type: str | None) -> None:
    """Add the flags of `PreferenceConfig` that are no flags of a run."""
    parser.add_argument(
        "--loss_type",
        metavar="NAME",
        default=loss_type,
        help=f"loss of a pair, by TRL's names: one of {', '.join(LOSS_TYPES)} (default: sigmoid)",
    )
    parser.add_argument(
        "--label_smoothing",
        metavar="X",
        type=float,
        default=0.0,
        help="share of the pairs that --loss_type robust takes to be the wrong way round, below "
        "0.5 (default: 0)",
    )
    parser.add_argument(
        "--precompute_ref_log_probs",
        metavar="true|false",
        nargs="?",
        const=True,
        type=_truth,
        help="compute the reference's logprobs of all pairs once before the first step, instead of "
        "in each step; its model then takes no memory while training (default: true where training "
        "goes through the pairs more than once)",
    )


def parse_supervised(
    argv: Sequence[str], prog: str, environment: Mapping[str, str]
) -> tuple[Config, PreferenceConfig | None]:
    """The flags of a process of supervised training; of preferences if it has --loss_type.

    Raises `ConfigError`.
    """
    parser = run_parser(prog)
    _add_preference(parser, None)
    given = parser.parse(argv)
    secrets = Layer("environment", flags_in_environment(environment))
    config = config_of(merged(layers_given(given.values, given.files, [secrets])))
    if given.own.loss_type is None:
        return config, None
    return config, preference_of(given.own, config)


def preference_of(own: Namespace, config: Config) -> PreferenceConfig:
    """The preference loss of a parsed command line. Raises `ConfigError`."""
    return PreferenceConfig(
        own.loss_type, config.loss.beta, own.label_smoothing, own.precompute_ref_log_probs
    )


def _truth(text: str) -> bool:
    try:
        return read_truth(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text}: {error}") from None
