"""`agentrl config`: the flags in force for a run, and the source of each value."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.table import Table
from rich.text import Text

from agentrl.configs.command_line import Given
from agentrl.configs.flag import ConfigError, nearest
from agentrl.configs.flags import (
    FLAGS,
    TITLES,
    Flag,
    Value,
    holds_secret,
    plain,
    shown,
)
from agentrl.configs.parsing import (
    DEFAULT,
    InForce,
    Layer,
    config_of,
    in_force,
    layers_given,
    merged,
    read_flags,
)
from agentrl.configs.verbs import config_parser
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import Deployment, read_deployment
from agentrl.launcher.inventory import read_inventory
from agentrl.launcher.presets import DEMO_ORIGIN, GRPO, PRESETS, Preset
from agentrl.launcher.run_folder import LaunchRecord, read_launch
from agentrl.launcher.stack import placed_layers

_RECORDED = "launch: "


def main(argv: Sequence[str]) -> int:
    """`agentrl config RUN [--preset NAME] [--all] [--yaml | --json] [flags]`."""
    given = config_parser().parse(argv)
    layers, head = _layers(given, read_deployment(os.environ))
    config_of(merged(layers))  # raises for flags that a launch would refuse
    held = in_force(layers)
    own = given.own
    if own.json:
        print(json.dumps(_content(held, all_flags=own.all), indent=2))
    elif own.yaml:
        print(_as_yaml(held, head, all_flags=own.all), end="")
    else:
        _print_table(held, head, all_flags=own.all)
    return 0


def _layers(given: Given, deployment: Deployment) -> tuple[list[Layer], str]:
    """Return the flags in force, and a sentence that says which launch they are from."""
    run = given.own.run
    own = layers_given(given.values, given.files, deployment.layers)
    output = config_of(merged([*own, Layer("command line", {"run_name": run})])).output
    launch = read_launch(output)
    if launch is not None and given.own.preset is None:
        recorded = [*_recorded(launch), *own, Layer("command line", {"run_name": run})]
        return recorded, f"{run}: as it was launched with {launch.preset}, in {output}"
    preset = find_preset(given.own.preset)
    inventory = read_inventory(os.environ, deployment.num_machines)
    layers, _ = placed_layers(preset, run, own, deployment, inventory)
    return layers, (
        f"{run}: as a launch with {preset.name} would take it (no launch of this name in {output})"
    )


def _recorded(launch: LaunchRecord) -> list[Layer]:
    """Return the flags of a run's launch, one layer for each origin."""
    layer = read_flags(launch.flags)
    by_origin: dict[str, dict[str, Value]] = {}
    for name, value in layer.values.items():
        origin = launch.origins.get(name)
        by_origin.setdefault(_RECORDED + origin if origin else "launch", {})[name] = value
    return [Layer(origin, values) for origin, values in by_origin.items()]


def find_preset(name: str | None) -> Preset:
    """The preset of that name, the first one without. Raises `ConfigError`."""
    if name is None:
        return GRPO
    if name not in PRESETS:
        meant = nearest(name, PRESETS)
        hint = f" (did you mean {meant}?)" if meant else ""
        raise ConfigError(f"--preset {name}: not known{hint}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def _listed(held: Mapping[str, InForce], group: str, *, all_flags: bool) -> list[Flag]:
    flags = [flag for flag in FLAGS.values() if flag.group == group]
    return [flag for flag in flags if all_flags or held[flag.name].origin != DEFAULT]


def _print_table(held: Mapping[str, InForce], head: str, *, all_flags: bool) -> None:
    console = TerminalConsole()
    console.print(head, markup=False, highlight=False, soft_wrap=True)
    # All groups have the same column widths.
    listed = [flag for group in TITLES for flag in _listed(held, group, all_flags=all_flags)]
    names = max(len(flag.name) for flag in listed)
    origins = max(len(held[flag.name].origin) for flag in listed)
    for group, title in TITLES.items():
        flags = _listed(held, group, all_flags=all_flags)
        if not flags:
            continue
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(min_width=names, no_wrap=True)
        table.add_column(min_width=min(origins, 24), overflow="fold", style="dim")
        table.add_column(overflow="fold")
        for flag in flags:
            value, origin = held[flag.name].value, held[flag.name].origin
            said = shown(flag, value) if value is not None else f"({flag.info.unset})"
            table.add_row(flag.name, Text(origin), Text(said))
        console.print(Text(f"\n{title}", "bold"))
        console.print(table)
    if not all_flags:
        console.print("\nAll others are at their defaults: --all shows them", style="dim")


def _content(held: Mapping[str, InForce], *, all_flags: bool) -> dict[str, Any]:
    """Return the flags for a `--config` file, without passwords.

    Without `all_flags` only values that the user gave are included.
    """
    return {
        flag.name: plain(flag, _own_value(held[flag.name]))
        for group in TITLES
        for flag in _listed(held, group, all_flags=all_flags)
        if not _is_secret(flag, held[flag.name])
        and (all_flags or not _set_by_launch(held[flag.name]))
        and (all_flags or _own_value(held[flag.name]) is not None)
    }


def _own_value(held: InForce) -> Value | None:
    """The flag's value; None if it follows from --loss_calculator."""
    return None if held.origin.startswith("paper of ") else held.value


def _set_by_launch(held: InForce) -> bool:
    """Whether every launch sets the value itself (preset or demo)."""
    return held.origin.removeprefix(_RECORDED) in (DEMO_ORIGIN, *PRESETS)


def _is_secret(flag: Flag, held: InForce) -> bool:
    return held.value is not None and holds_secret(flag, held.value)


def _as_yaml(held: Mapping[str, InForce], head: str, *, all_flags: bool) -> str:
    """Format the content as YAML, with the groups as comments."""
    content = _content(held, all_flags=all_flags)
    lines = [f"# {head}"]
    if not all_flags:
        lines.append("# Not in here: what the launch sets by itself (--all).")
    for group, title in TITLES.items():
        flags = _listed(held, group, all_flags=all_flags)
        own = {flag.name: content[flag.name] for flag in flags if flag.name in content}
        hidden = [flag.name for flag in flags if _is_secret(flag, held[flag.name])]
        if own or hidden:
            lines += ["", f"# {title}"]
        lines += [f"# {name}: left out, it holds a password" for name in hidden]
        if own:
            lines.append(yaml.safe_dump(own, sort_keys=False, allow_unicode=True).rstrip())
    return "\n".join(lines) + "\n"
