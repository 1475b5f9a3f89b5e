"""The parsers of the verbs whose own modules load slowly, so that `--help` is fast."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.configs.command_line import RUN_FLAGS_EPILOG, Parser
from agentrl.configs.flags import flags_named
from agentrl.configs.parsing import in_brackets, in_force
from agentrl.configs.supervised_verbs import dpo_parser as dpo_parser
from agentrl.configs.supervised_verbs import sft_parser as sft_parser
from agentrl.configs.text_checks import check_service_url, check_variable_name

_RUN_FLAGS_FOLLOW = "Flags of the run may follow: `agentrl train --help` lists them."
SGLANG_COMMAND = "python3 -m sglang.launch_server"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DOCTOR_FLAGS = flags_named(
    "chat_template_kwargs", "tool_call_parser", "db_connection_string", "mcp_manager_url",
    "mcp_server_name", "mcp_auth_token", "mcp_allow_tools", "mcp_block_tools", "inference_urls",
    "inference_api_key_env", "max_prompt_tokens", "max_tokens",
)  # fmt: skip
# Flags of a run, and of `agentrl serve` by itself, that only SGLang has.
SGLANG_FLAGS = flags_named("inf_tp_size", "inf_ep_size", "inf_mem_ratio")
_LAUNCHED = "Flags that are not given are those of the run's launch."
SHOWN_RECORDS = 20
_MOST_DIGITS = 9  # of a number of records: MongoDB's limits are of 64 bits
DEFAULTS = in_brackets(in_force(()))
_ITS_OWN = {**DEFAULTS, "db_connection_string": "default: the run's own"}
_NEEDED = {"db_connection_string": "needed"}
_CHECKED = {
    **DEFAULTS,
    "db_connection_string": "default: none is checked",
    "inference_urls": "default: none is checked",
}


def train_parser() -> Parser:
    """The parser of `agentrl train`."""
    return _whole(
        "agentrl train",
        "Run one trainer process of a run, under `accelerate launch`. It needs "
        "--db_connection_string.",
    )


def sample_parser() -> Parser:
    """The parser of `agentrl sample`."""
    parser = _whole(
        "agentrl sample",
        "Sample trajectories: with --model and --tasks for a run of its own with fixed weights, "
        "until all tasks are done; else for the run of that name in --db_connection_string, until "
        "it is finished.",
        {
            "db_connection_string": "needed to join a run; default with --model and --tasks: "
            "DB_URL, else a MongoDB of the run's own"
        },
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="model to sample with: a folder, a checkpoint, or a run for its last one (default: "
        "that of the run that is joined)",
    )
    parser.add_argument(
        "--tasks", metavar="FILE", help="tasks to sample: JSONL, JSON or Parquet (with --model)"
    )
    return parser


def gateway_parser() -> Parser:
    """The parser of `agentrl gateway`."""
    return _whole(
        "agentrl gateway",
        "Hand the tasks of a run with --agent_name outside to programs that ask for them, and "
        "answer what they ask the model, until the run is finished. It joins the run of that name "
        "in --db_connection_string.",
    )


def _whole(prog: str, description: str, shown: Mapping[str, str] = _NEEDED) -> Parser:
    """The parser of a verb that takes only the run's flags."""
    parser = Parser(prog, description, usage=f"{prog} [--flag value ...]", epilog=RUN_FLAGS_EPILOG)
    parser.add_config()
    parser.add_run_flags(shown={**DEFAULTS, **shown})
    return parser


def eval_parser() -> Parser:
    """The parser of `agentrl eval`."""
    parser = Parser(
        "agentrl eval",
        "Evaluate a run's checkpoint on its held-out tasks, or any models side by side. An "
        "evaluation that was interrupted goes on.",
        usage="agentrl eval (RUN | --model MODEL ... --tasks FILE ...) [flags]",
        epilog=f"{_RUN_FLAGS_FOLLOW} {_LAUNCHED} Environment variables as for a launch.",
    )
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="name of the run whose checkpoint is evaluated"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="STEP",
        help="step or folder of the run's checkpoint to evaluate (default: the last one)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        action="extend",
        nargs="+",
        default=[],
        help="models to evaluate instead, each a folder, a checkpoint, or a run for its last one",
    )
    parser.add_argument(
        "--tasks",
        metavar="FILE",
        action="extend",
        nargs="+",
        default=[],
        help="task files to evaluate on: JSONL, JSON or Parquet (default: --eval_file)",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="base URL of an OpenAI-compatible API, up to /v1, whose model is evaluated too",
    )
    parser.add_argument("--endpoint_model", metavar="NAME", help="name of the model at --endpoint")
    parser.add_argument(
        "--endpoint_key_env",
        metavar="VARIABLE",
        type=_variable_name,
        help="environment variable with the key of --endpoint (default: OPENAI_API_KEY, if set)",
    )
    parser.add_argument(
        "--again", action="store_true", help="evaluate anew what has been evaluated before"
    )
    parser.add_config()
    parser.add_run_flags()
    return parser


def export_data_parser() -> Parser:
    """The parser of `agentrl export-data`."""
    parser = Parser(
        "agentrl export-data",
        "Write a run's trajectories to a file for Hugging Face datasets.",
        usage="agentrl export-data RUN --format FORMAT [flags]",
    )
    _add_run(parser)
    parser.add_argument(
        "--format",
        choices=("messages", "tokens", "preferences"),
        required=True,
        help="conversations with their tools, segments with all per-token data, or the best and "
        "the worst conversation of each task (needed)",
    )
    parser.add_argument(
        "--to", choices=("parquet", "jsonl"), default="parquet",
        help="kind of the file (default: parquet)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", help="file to write, which must not exist (default: RUN-FORMAT.TO)"
    )
    _add_where(
        parser,
        "conditions that all trajectories fulfil, as those of `agentrl show` (default: none)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "eval"),
        default="train",
        help="split of the trajectories: training or evaluation (default: train)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="folder of the model whose chat template reads the turns (default: the run's)",
    )
    return parser


def import_parser() -> Parser:
    """The parser of `agentrl import`."""
    parser = Parser(
        "agentrl import",
        "Make a run of the trajectories in a file: one of `agentrl export-data`, or another file "
        "of messages or preferences.",
        usage="agentrl import FILE --run_name RUN [flags]",
    )
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="file to read: Parquet, JSONL or JSON"
    )
    parser.add_run_flags(("run_name", "output_dir", "db_connection_string"), _ITS_OWN)
    return parser


def rescore_parser() -> Parser:
    """The parser of `agentrl rescore`."""
    parser = Parser(
        "agentrl rescore",
        "Score a run's stored trajectories again.",
        usage="agentrl rescore RUN --scorer NAME [--where ...] [--flag value ...]",
        epilog=f"{_RUN_FLAGS_FOLLOW} {_LAUNCHED}",
    )
    _add_name(parser)
    parser.add_argument(
        "--scorer",
        metavar="NAME",
        required=True,
        help="scorer to score with: its name, or a sum like '0.7*math + 0.3*f1'",
    )
    _add_where(
        parser,
        "conditions, as those of `agentrl show`: a group in which a record meets all of them is "
        "scored again as a whole (default: all groups)",
    )
    parser.add_config()
    parser.add_run_flags()
    return parser


def replay_parser() -> Parser:
    """The parser of `agentrl replay`."""
    parser = Parser(
        "agentrl replay",
        "Run the programs of a run's stored trajectories again. What they ask is answered from the "
        "ledger, and nothing of the run changes.",
        usage="agentrl replay RUN [RECORD ...] [--check] [--flag value ...]",
        epilog=f"{_RUN_FLAGS_FOLLOW} {_LAUNCHED}",
    )
    _add_name(parser)
    parser.add_argument(
        "records",
        metavar="RECORD",
        nargs="*",
        help="ids of trajectories to replay (default: the newest, and with --check all finished "
        "ones)",
    )
    _add_where(
        parser,
        "conditions that all trajectories fulfil, as those of `agentrl show` (default: none)",
    )
    parser.add_argument(
        "--count",
        metavar="N",
        type=_count,
        help="largest number of trajectories, of which the newest are taken (default: 1, and with "
        "--check all)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "eval"),
        default="train",
        help="split of the trajectories: training or evaluation (default: train)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="test the program: ask no service, print what differs from the records, and exit with "
        "status 1 if anything does",
    )
    parser.add_config()
    parser.add_run_flags()
    return parser


def config_parser() -> Parser:
    """The parser of `agentrl config`."""
    parser = Parser(
        "agentrl config",
        "Print the flags in force for a run, and where each value comes from.",
        usage="agentrl config RUN [--all] [--yaml] [--flag value ...]",
        epilog=f"{_RUN_FLAGS_FOLLOW} What --yaml prints can be given to a run as --config FILE.",
    )
    parser.add_argument("run", metavar="RUN", help="name of the run, which need not exist yet")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="preset of the launch (default: that of the run's launch, whose flags then apply; "
        "grpo for a run that was not launched)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also list the flags at their default",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--yaml", action="store_true", help="print the flags as a file for --config")
    form.add_argument("--json", action="store_true", help="print the flags as JSON")
    parser.add_config()
    parser.add_run_flags()
    return parser


def memory_parser() -> Parser:
    """The parser of `agentrl memory`."""
    parser = Parser(
        "agentrl memory",
        "Estimate the memory of a step on each process, by the model's config and the run's flags.",
        usage="agentrl memory [--processes N] [--flag value ...]",
        epilog=_RUN_FLAGS_FOLLOW,
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        default=1,
        help="number of trainer processes (default: 1)",
    )
    parser.add_argument(
        "--device_gib",
        metavar="X",
        type=float,
        help="memory of one GPU in GiB; the estimate then says what fits (default: none)",
    )
    parser.add_config()
    parser.add_run_flags()
    return parser


def plan_parser() -> Parser:
    """The parser of `agentrl plan`."""
    parser = Parser(
        "agentrl plan",
        "Print which GPUs a launch would train and serve on, and how, without starting anything.",
        usage="agentrl plan [--gpus 8x80] [--preset NAME] [--flag value ...]",
        epilog=f"{_RUN_FLAGS_FOLLOW} Environment variables as for a launch.",
    )
    parser.add_argument(
        "--gpus",
        metavar="NxGIB",
        help="number of GPUs and the GiB of each: 8x80, or 2x8x80 for two machines (default: "
        "those of this machine, NUM_MACHINES times)",
    )
    parser.add_argument(
        "--preset", metavar="NAME", default="grpo", help="preset of the launch (default: grpo)"
    )
    parser.add_config()
    parser.add_run_flags()
    return parser


def export_parser() -> Parser:
    """The parser of `agentrl export`."""
    parser = Parser("agentrl export", "Write a checkpoint as a Hugging Face folder.")
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="checkpoint-N folder, or a run's folder for its last one",
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="folder to write, which must not exist"
    )
    parser.add_argument(
        "--model_name_or_path",
        metavar="DIR",
        help="folder of the model that the run started from (default: as recorded)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the LoRA adapter, and not the model with it merged in",
    )
    return parser


def show_parser() -> Parser:
    """The parser of `agentrl show`."""
    parser = Parser(
        "agentrl show",
        "Print one trajectory, two side by side, a list of records, or the tasks with failures.",
    )
    _add_run(parser)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "record", metavar="RECORD", nargs="?", help="the Record's id (default: the newest)"
    )
    wanted.add_argument(
        "--failed",
        action="store_true",
        help="list the errors of rollouts given up or tried again, and what is in quarantine",
    )
    for order, which in (("list", "newest"), ("worst", "worst"), ("best", "best")):
        wanted.add_argument(
            f"--{order}",
            dest="order",
            action="store_const",
            const=which,
            help=f"list the {which} records, one line each",
        )
    wanted.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="print two records of a task side by side, from where they part",
    )
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="print a line for each token of the record: id, mask, logprob, advantage, policy "
        "version, text",
    )
    parser.add_argument("--json", action="store_true", help="print what is shown as JSON")
    _add_where(
        parser,
        "list the records that match all conditions: 'score<0.5', status=failed, step=10, "
        "trained=true, label=NAME, 'tokens.generated>200', or a MongoDB filter (JSON)",
    )
    parser.add_argument(
        "--count",
        metavar="N",
        type=_count,
        help="largest number of records to list, or of errors with --failed (default: "
        f"{SHOWN_RECORDS})",
    )
    parser.add_argument(
        "--split",
        choices=("train", "eval"),
        default="train",
        help="split of the records: training or evaluation (default: train)",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of records")
    return int(text)


def runs_parser() -> Parser:
    """The parser of `agentrl runs`."""
    parser = Parser("agentrl runs", "List the runs that are here, with the state of each.")
    parser.add_argument(
        "--output_root",
        metavar="DIR",
        default="output",
        help="folder that holds the folders of the runs (default: output)",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON objects")
    parser.add_run_flags(
        ("db_connection_string",),
        {"db_connection_string": "default: DB_URL; its runs are listed too"},
    )
    return parser


def db_parser() -> Parser:
    """The parser of `agentrl db`."""
    parser = Parser(
        "agentrl db",
        "Open a run's database and print its address for MongoDB Compass, until Ctrl-C.",
    )
    _add_run(parser)
    return parser


def view_parser() -> Parser:
    """The parser of `agentrl view`."""
    parser = Parser(
        "agentrl view",
        "Open pages about runs in a browser: curves, tasks, trajectories, failures. Until Ctrl-C.",
    )
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="run whose page is opened (default: the list of runs)"
    )
    parser.add_argument(
        "--output_root",
        metavar="DIR",
        default="output",
        help="folder of the runs (default: output)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1); another one needs AGENTRL_VIEW_PASSWORD",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, default=8265, help="port to listen on; 0: a free one (default: 8265)"
    )
    parser.add_run_flags(
        ("output_dir", "db_connection_string"),
        {**DEFAULTS, "db_connection_string": "default: DB_URL"},
    )
    return parser


def release_parser() -> Parser:
    """The parser of `agentrl release`."""
    parser = Parser("agentrl release", "Put a run's quarantined groups, records and rows back.")
    _add_run(parser)
    parser.add_argument(
        "ids",
        metavar="ID",
        nargs="*",
        help="ids that `agentrl show RUN --failed` lists (default: all that is in quarantine)",
    )
    return parser


def delete_parser() -> Parser:
    """The parser of `agentrl delete`."""
    parser = Parser("agentrl delete", "Delete a run: its folder, its database and its logs.")
    _add_run(parser)
    parser.add_argument(
        "--keep_database",
        action="store_true",
        help="keep the database if it is in a MongoDB of your own",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="delete the run without a question, as in a script",
    )
    return parser


def _add_name(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of the run")


def _add_run(parser: Parser) -> None:
    """Add the run's name, and the flags of its folder and database."""
    _add_name(parser)
    parser.add_run_flags(("output_dir", "db_connection_string"), _ITS_OWN)


def _add_where(parser: Parser, help: str) -> None:
    """Add conditions on Records, which `launcher/record_filter.py` reads."""
    parser.add_argument("--where", nargs="+", default=[], metavar="FIELD=VALUE", help=help)


def _service_url(text: str) -> str:
    return _checked(text, check_service_url)


def _service_count(text: str) -> int | None:
    """A number of services; None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is neither a number above 0 nor auto")
    return int(text)


def _variable_name(text: str) -> str:
    return _checked(text, check_variable_name)


def _checked(text: str, check: Callable[[str], None]) -> str:
    try:
        check(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def doctor_parser() -> Parser:
    """The parser of `agentrl doctor`."""
    parser = Parser("agentrl doctor", "Check this machine, and the given model and services.")
    parser.add_argument(
        "--model", metavar="DIR", help="folder of the model to check (default: none)"
    )
    parser.add_run_flags(DOCTOR_FLAGS, _CHECKED)
    return parser


def serve_parser() -> Parser:
    """The parser of `agentrl serve`."""
    parser = Parser("agentrl serve", "Answer token prompts over SGLang's API, until SIGTERM.")
    flag = parser.add_argument
    flag("--model", metavar="DIR", type=Path, required=True, help="folder of the model to serve")
    flag(
        "--engine",
        choices=("local", "sglang"),
        help="engine that serves the model (default: sglang on a machine with GPUs, else local)",
    )
    flag(
        "--host", metavar="NAME", default="127.0.0.1",
        help="address that the service listens on (default: 127.0.0.1, for this machine only)",
    )  # fmt: skip
    flag(
        "--port", metavar="N", type=int, default=30000,
        help="port that the service listens on; 0 takes a free one (default: 30000)",
    )  # fmt: skip
    flag(
        "--services", metavar="N", type=_service_count, default=1,
        help="number of services, each a process on ports that follow --port, restarted when it "
        "dies; auto: as many as fit this machine's GPUs, placed as a launch places them (default: "
        "1)",
    )  # fmt: skip
    flag(
        "--device", metavar="NAME",
        help="device that computes, cpu or cuda (default: cpu with the local engine, with SGLang "
        "its own choice)",
    )  # fmt: skip
    flag(
        "--dtype", metavar="NAME", choices=DTYPES,
        help=f"type of weights and computation: one of {', '.join(DTYPES)} (default: float32, with "
        "SGLang the model's)",
    )  # fmt: skip
    flag(
        "--fp32_head", action="store_true",
        help="compute the output head in float32, as a trainer with --fp32_head does",
    )  # fmt: skip
    flag(
        "--enable_metrics", action="store_true",
        help="answer Prometheus at /metrics of the service's port, without a key",
    )  # fmt: skip
    flag(
        "--context_length", metavar="N", type=int,
        help="largest number of tokens of a prompt with its output (default: the model's)",
    )  # fmt: skip
    flag(
        "--max_running_requests", metavar="N", type=int, default=128,
        help="largest number of requests that run at once (default: 128)",
    )  # fmt: skip
    flag(
        "--weight_version", metavar="N", type=int, default=-1,
        help="policy version of the served weights; -1 is none (default: -1)",
    )  # fmt: skip
    flag("--seed", metavar="N", type=int, default=0, help="seed of sampling (default: 0)")
    flag(
        "--db_connection_string", metavar="URL",
        help="mongodb:// URL of the MongoDB of the run that the service is announced to (default: "
        "DB_URL if --run_name is given, else it is announced to no run)",
    )  # fmt: skip
    flag(
        "--run_name",
        metavar="NAME",
        help="name of the run that the service is announced to (default: run, with "
        "--db_connection_string)",
    )
    flag(
        "--startup_timeout", metavar="X", type=float, default=300.0,
        help="time limit of the wait for the run's MongoDB, in seconds (default: 300)",
    )  # fmt: skip
    flag(
        "--public_url", metavar="URL", type=_service_url,
        help="URL under which other machines reach the service (default: host and port)",
    )  # fmt: skip
    flag(
        "--inference_api_key_env", metavar="NAME", type=_variable_name,
        help="name of the environment variable that holds the key that clients must show as a "
        "bearer token; needed where other machines reach --host (default: no key)",
    )  # fmt: skip
    sglang = parser.add_argument_group("with --engine sglang").add_argument
    sglang(
        "--sglang_command", metavar="TEXT",
        help="command that starts SGLang's server in its own environment, with further arguments "
        "of the server (default: SGLANG_COMMAND, else that of .venv-sglang, else "
        f"`{SGLANG_COMMAND}`)",
    )  # fmt: skip
    sglang(
        "--inf_tp_size", metavar="N", type=int,
        help="number of GPUs over which tensor parallelism splits layers (default: 1, with "
        "--services auto as few as the model needs)",
    )  # fmt: skip
    sglang(
        "--inf_ep_size", metavar="N", type=int, default=1,
        help="number of GPUs over which experts are distributed (default: 1)",
    )  # fmt: skip
    sglang(
        "--inf_mem_ratio", metavar="X", type=float,
        help="share of a GPU's memory for weights and cache, between 0 and 1 (default: SGLang's "
        "choice)",
    )  # fmt: skip
    sglang(
        "--memory_saver", action="store_true",
        help="let the service release its GPU memory while the trainer computes",
    )  # fmt: skip
    return parser
