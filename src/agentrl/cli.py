"""The `agentrl` command: one thin function for each verb, imported when it is called."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from agentrl import __version__
from agentrl.importing import importing
from agentrl.user_errors import status_of

USAGE = """\
agentrl trains language models that act through tools, by reinforcement
learning.

  agentrl VERB [flags]          `agentrl VERB --help` lists the flags of a verb

{verbs}

On one machine the scripts start all parts of a run:  ./grpo_example.sh RUN
"""


@dataclass(frozen=True)
class Verb:
    """A verb: `module.function(argv)` returns the exit status.

    A verb whose module takes seconds to load has its help elsewhere: `parser` names a function of
    `configs.verbs`, or `help_module` a module whose `main(argv)` prints the help.
    """

    help: str
    module: str
    function: str = "main"
    parser: str | None = None
    help_module: str | None = None

    def load(self) -> Callable[[Sequence[str]], int]:
        """Import what the verb needs."""
        with importing():
            module = import_module(self.module)
        function: Callable[[Sequence[str]], int] = getattr(module, self.function)
        return function

    def print_help(self, argv: Sequence[str]) -> bool:
        """Print the help of a verb whose module need not be loaded for it."""
        if self.help_module is not None:
            import_module(self.help_module).main(argv)
        elif self.parser is not None:
            getattr(import_module("agentrl.configs.verbs"), self.parser)().print_help()
        else:
            return False
        return True


VERBS = {
    "launch": Verb(
        "start all parts of a run on this machine",
        "agentrl.launcher.run",
        help_module="agentrl.launcher.launch_help",
    ),
    "train": Verb(
        "train a run (under accelerate launch, on many GPUs)",
        "agentrl.training.trainer",
        "run_process",
        parser="train_parser",
    ),
    "sample": Verb(
        "sample trajectories for a run",
        "agentrl.launcher.sampler_processes",
        parser="sample_parser",
    ),
    "gateway": Verb(
        "hand tasks to programs on other machines",
        "agentrl.gateway.gateway_process",
        parser="gateway_parser",
    ),
    "serve": Verb(
        "answer token prompts over HTTP", "agentrl.launcher.serve", parser="serve_parser"
    ),
    "eval": Verb(
        "evaluate a run's checkpoint or any models on tasks",
        "agentrl.launcher.evaluate",
        parser="eval_parser",
    ),
    "sft": Verb(
        "train a model on conversations, supervised", "agentrl.launcher.sft", parser="sft_parser"
    ),
    "dpo": Verb("train a model on pairs of answers", "agentrl.launcher.dpo", parser="dpo_parser"),
    "rescore": Verb(
        "score a run's stored trajectories anew",
        "agentrl.launcher.rescore",
        parser="rescore_parser",
    ),
    "replay": Verb(
        "run the programs of stored trajectories again, answered from the ledger",
        "agentrl.launcher.replay",
        parser="replay_parser",
    ),
    "config": Verb("print the flags of a run, and where they come from", "agentrl.launcher.config"),
    "export": Verb(
        "write a checkpoint as a Hugging Face folder",
        "agentrl.training.model.export",
        parser="export_parser",
    ),
    "export-data": Verb(
        "write trajectories for Hugging Face datasets",
        "agentrl.launcher.export_data",
        parser="export_data_parser",
    ),
    "import": Verb(
        "make a run of the trajectories in a file",
        "agentrl.launcher.import_data",
        parser="import_parser",
    ),
    "show": Verb("print trajectories", "agentrl.launcher.show", parser="show_parser"),
    "view": Verb(
        "open pages about runs in a browser", "agentrl.viewer.command", parser="view_parser"
    ),
    "release": Verb(
        "put back what is in quarantine",
        "agentrl.launcher.release",
        parser="release_parser",
    ),
    "runs": Verb("list the runs that are here", "agentrl.launcher.runs", parser="runs_parser"),
    "db": Verb(
        "open a run's database, for MongoDB Compass", "agentrl.launcher.db", parser="db_parser"
    ),
    "delete": Verb(
        "delete a run: folder, database and logs", "agentrl.launcher.delete", parser="delete_parser"
    ),
    "plan": Verb(
        "which GPUs a launch would use, and how",
        "agentrl.launcher.plan",
        parser="plan_parser",
    ),
    "memory": Verb(
        "what a step takes on each GPU",
        "agentrl.training.model.memory_report",
        parser="memory_parser",
    ),
    "doctor": Verb(
        "check this machine, a model and the services",
        "agentrl.launcher.doctor",
        parser="doctor_parser",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status. Bad input prints one sentence and returns 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        verbs = "\n".join(f"  {name:{width}}  {verb.help}" for name, verb in VERBS.items())
        print(USAGE.format(verbs=verbs), end="")
        return 0
    if arguments[0] == "--version":
        print(f"agentrl {__version__}")
        return 0
    name = arguments[0]
    if name not in VERBS:
        meant = next((f": did you mean {verb}?" for verb in get_close_matches(name, VERBS)), "")
        print(f"agentrl: no verb {name!r}; there are {', '.join(VERBS)}{meant}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & {*arguments} and VERBS[name].print_help(arguments[1:]):
        return 0
    return status_of(f"agentrl {name}", VERBS[name].load(), arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
