"""The command-line parser of all verbs, on argparse.

Each flag has one listed spelling. An error is one sentence. The help is grouped and at most 80
columns wide. Flags of other trainers are taken under their names (`familiar/`) and not listed.
"""

import os
import re
import shutil
import sys
from argparse import SUPPRESS, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.configs.familiar import FAMILIAR, translate
from agentrl.configs.flag import ConfigError, nearest
from agentrl.configs.flags import FLAGS, TITLES, Flag, Value

_COLUMNS = 80
_HELP_COLUMN = 30
_MESSAGE = re.compile(r"^argument (?:--\w+/)*(--\w+|\w+): ")  # argparse lists all spellings
_CONFIG_HELP = "YAML file of flags (docs/reference/flags.md); the command line takes precedence"
RUN_FLAGS_EPILOG = (
    "A true|false flag without a value means true. Brackets show the value of a flag that is not "
    "given, and where that value comes from."
)


@dataclass(frozen=True)
class Given:
    """A parsed command line: the verb's arguments, the run's flags, and the files of flags."""

    own: Namespace
    values: Mapping[str, Value]
    files: Sequence[str]


class Parser(ArgumentParser):
    """The parser of one verb. It raises `ConfigError` where argparse prints and exits."""

    def __init__(
        self, prog: str, description: str, *, epilog: str | None = None, usage: str | None = None
    ) -> None:
        width = min(_COLUMNS, shutil.get_terminal_size().columns)
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            usage=usage,
            allow_abbrev=False,
            formatter_class=lambda prog: HelpFormatter(
                prog, max_help_position=min(_HELP_COLUMN, width // 2), width=width
            ),
        )
        self._run_flags: dict[str, Flag] = {}
        self._takes_familiar = False
        self._listed_by = f"`{prog} --help` lists them all"
        self._spellings = {
            f"--{alias}": f"--{flag.name}" for flag in FLAGS.values() for alias in flag.info.aliases
        }

    def add_run_flags(
        self, only: Sequence[str] | None = None, shown: Mapping[str, str] | None = None
    ) -> None:
        """Accept the run's flags, or those in `only`.

        `shown`: the text in brackets behind each help. Without it the help does not list the flags,
        and refers to `agentrl train --help`; if it is empty, another parser prints the help.
        """
        if shown is None:
            self._listed_by = f"`{self.prog} --help` and `agentrl train --help` list them all"
        alone: dict[str, Any] = {"nargs": "?", "const": "true"}
        if only is None:
            self.add_familiar_flags()
        for group, title in TITLES.items():
            flags = [flag for flag in FLAGS.values() if flag.group == group]
            flags = [flag for flag in flags if only is None or flag.name in only]
            listed = self if only is not None else self.add_argument_group(title)
            for flag in flags:
                self._run_flags[flag.name] = flag
                help = f"{flag.meaning} ({shown[flag.name]})" if shown else SUPPRESS
                listed.add_argument(
                    f"--{flag.name}",
                    dest=f"flag {flag.name}",  # a space, so that no argument of a verb clashes
                    metavar=flag.metavar,
                    default=SUPPRESS,
                    help=help.replace("%", "%%"),
                    **(alone if flag.type is bool else {}),
                )

    def add_familiar_flags(self) -> None:
        """Accept flags of other trainers. What they become must be flags that are accepted."""
        self._takes_familiar = True
        for name, flag in FAMILIAR.items():
            words: dict[str, Any] = {"nargs": "?", "const": "true"}
            if flag.several:
                words = {"nargs": "*"}
            self.add_argument(
                f"--{name}", dest=f"familiar {name}", default=SUPPRESS, help=SUPPRESS, **words
            )

    def add_config(self) -> None:
        """Accept `--config FILE`, any number of times."""
        self.add_argument(
            "--config", dest="files", metavar="FILE", action="append", default=[],
            help=_CONFIG_HELP,
        )  # fmt: skip

    def parse(self, argv: Sequence[str]) -> Given:
        """Parse `argv`. Raises `ConfigError`."""
        own, unknown = self.parse_known_args([*self._one_spelling_each(argv)])
        if unknown:
            raise ConfigError(self._not_known(unknown[0]))
        values: dict[str, Value] = {}
        for name, flag in self._run_flags.items():
            text = own.__dict__.pop(f"flag {name}", None)
            if text is not None:
                values[name] = flag.read(text)
        familiar: dict[str, str] = {}
        for name in FAMILIAR if self._takes_familiar else ():
            said = own.__dict__.pop(f"familiar {name}", None)
            if said is not None:
                familiar[name] = ",".join(said) if isinstance(said, list) else said
        values |= self._known_here(read_familiar(familiar, values))
        return Given(own, values, own.__dict__.pop("files", []))

    def _known_here(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """The flags that familiar flags have become. Raises `ConfigError` if the verb lacks one."""
        for name, value in values.items():
            if name not in self._run_flags:
                raise ConfigError(f"--{name} {value}: `{self.prog}` has no such flag; leave it out")
        return values

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` with one sentence instead of printing the usage."""
        raise ConfigError(_MESSAGE.sub(r"\1: ", message))

    def _one_spelling_each(self, argv: Sequence[str]) -> list[str]:
        """Normalise the words to what argparse accepts.

        `--max-turns 3` becomes `--max_turns 3`, `--no_bf16` becomes `--bf16 false`, and
        `--epsilon -1e-3` becomes `--epsilon=-1e-3`.
        """
        known = {option for action in self._actions for option in action.option_strings}
        words: list[str] = []
        for word in argv:
            option, equals, value = word.partition("=")
            spelt = "--" + option[2:].replace("-", "_") if option.startswith("--") else option
            spelt = self._spellings.get(spelt, spelt)
            negated = spelt.removeprefix("--no_")
            if spelt in known:
                words.append(spelt + equals + value)
            elif not equals and negated != spelt and self._is_switch(negated):
                words += [f"--{negated}", "false"]
            elif re.match(r"-[\d.]", word) and words and words[-1] in known:
                words[-1] += f"={word}"
            else:
                words.append(word)
        return words

    def _is_switch(self, name: str) -> bool:
        if self._takes_familiar and name in FAMILIAR:
            return True
        return name in self._run_flags and self._run_flags[name].type is bool

    def _not_known(self, word: str) -> str:
        hint = self._listed_by
        if not word.startswith("-"):
            return f"{word!r} belongs to no flag: {hint}"
        flag = word.partition("=")[0]
        known = (
            option
            for action in self._actions
            if not action.dest.startswith("familiar ")
            for option in action.option_strings
        )
        meant = nearest(flag.replace("-", "_"), (o.replace("-", "_") for o in known if len(o) > 2))
        if meant is None:
            return f"unknown flag {flag}: {hint}"
        return f"unknown flag {flag}: did you mean {'--' + meant[2:]}? {hint}"


def run_parser(prog: str) -> Parser:
    """Return a parser of the run's flags only, without help. `prog --help` lists these flags."""
    parser = Parser(prog, "")
    parser.add_config()
    parser.add_run_flags(shown={})
    return parser


def read_familiar(familiar: Mapping[str, str], given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the flags of a run that flags of other trainers become, and print why others are idle.

    `given`: the run's flags beside them. Raises `ConfigError` for what is refused.
    """
    values, lines = translate(
        {name: (FAMILIAR[name], said) for name, said in familiar.items()}, given
    )
    print_idle(lines)
    return {name: FLAGS[name].read(str(value)) for name, value in values.items()}


_printed: set[str] = set()


def print_idle(lines: Sequence[str]) -> None:
    """Print why flags have no effect to stderr, in one block, each line once.

    Of a trainer only the first process does.
    """
    new = [line for line in lines if line not in _printed]
    _printed.update(new)
    if new and os.environ.get("RANK", "0") == "0":
        print(
            "Taken, without effect here:", *(f"  {line}" for line in new), sep="\n", file=sys.stderr
        )
