"""The help of a launch: variables and flags, with the values of preset, demo and environment.

It is separate from `run.py`, whose imports take long.
"""

import os
from collections.abc import Sequence

from agentrl.configs.command_line import RUN_FLAGS_EPILOG, Parser, run_parser
from agentrl.configs.parsing import in_brackets, in_force, layers_given
from agentrl.launcher.deployment import count_gpus, describe_variables, read_deployment
from agentrl.launcher.presets import PRESETS, Preset, launch_layers


def main(argv: Sequence[str]) -> int:
    """Print it. Flags that stand beside `--help` count: so do a model and a file of flags."""
    if not argv or argv[0] not in PRESETS:
        print(
            f"agentrl launch {' | '.join(PRESETS)} RUN [--flag value ...]   starts a run\n\n"
            f"`agentrl launch {next(iter(PRESETS))} --help` lists variables and flags"
        )
        return 0
    preset = PRESETS[argv[0]]
    command = typed_command(preset)
    words = [word for word in argv[1:] if word not in ("-h", "--help")]
    run = words.pop(0) if words and not words[0].startswith("-") else "RUN"
    given = run_parser(command).parse(words)
    deployment = read_deployment(os.environ)
    own = layers_given(given.values, given.files, deployment.layers)
    layers = launch_layers(preset, run, own, deployment, count_gpus(os.environ))
    parser = Parser(
        command,
        f"Trains with {preset.title}, all parts on this machine. Without a model of your own it is "
        "the demo.",
        usage=f"{command} RUN [--flag value ...]",
        epilog=f"{RUN_FLAGS_EPILOG} `agentrl config {run}` prints what is in force for a run.",
    )
    variables = parser.add_argument_group("Environment variables, which flags win over")
    for name, text in describe_variables(deployment).items():
        variables.add_argument(name, help=text.replace("%", "%%"))  # this parser is only printed
    parser.add_config()
    parser.add_run_flags(shown=in_brackets(in_force(layers)))
    parser.print_help()
    return 0


def typed_command(preset: Preset) -> str:
    """What the user called: the script, which says so, or the verb."""
    return os.environ.get("AGENTRL_COMMAND") or f"agentrl launch {preset.name}"
