"""`agentrl plan`: prints which GPUs a launch would train and serve on, and starts nothing."""

import os
from collections.abc import Sequence
from dataclasses import replace

from agentrl.configs import ConfigError
from agentrl.configs.parsing import config_of, layers_given, merged
from agentrl.configs.verbs import plan_parser
from agentrl.launcher.config import find_preset
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.gpu_plan import ORIGIN, plan_lines, step_line
from agentrl.launcher.inventory import described, read_inventory
from agentrl.launcher.report import print_lines
from agentrl.launcher.stack import placed_layers


def main(argv: Sequence[str]) -> int:
    """`agentrl plan [--gpus 8x80] [--preset NAME] [flags]`. Raises `ConfigError` if none fits."""
    given = plan_parser().parse(argv)
    deployment = read_deployment(os.environ)
    if given.own.gpus is None:
        inventory = read_inventory(os.environ, deployment.num_machines)
    else:
        inventory = described(given.own.gpus)
        deployment = replace(deployment, num_machines=inventory.machines)
    own = layers_given(given.values, given.files, deployment.layers)
    layers, placement = placed_layers(
        find_preset(given.own.preset), "plan", own, deployment, inventory
    )
    if placement is None:
        raise ConfigError(
            "there is no NVIDIA GPU to place anything on: describe some with --gpus 8x80"
        )
    lines = [*plan_lines(placement), step_line(placement, config_of(merged(layers)))]
    print_lines(TerminalConsole(), lines)
    (placed,) = (layer for layer in layers if layer.origin == ORIGIN)
    flags = [f"--{name} {str(value).lower()}" for name, value in placed.values.items()]
    print_lines(TerminalConsole(), [f"flags: {' '.join(flags)}"])
    return 0
