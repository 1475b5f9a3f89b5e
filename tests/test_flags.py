"""Flags as people meet them: help, spellings, files, and where a value comes from."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from agentrl import cli
from agentrl.configs import Config, ConfigError, parse_config
from agentrl.configs.flags import FLAGS, flags_named
from agentrl.configs.losses import LOSSES
from agentrl.configs.parsing import Layer, as_words, config_of, in_force, merged
from agentrl.configs.verbs import DTYPES, train_parser
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.inventory import Inventory
from agentrl.launcher.presets import PRESETS
from agentrl.launcher.run_folder import LaunchRecord, write_launch
from agentrl.launcher.stack import plan_stack

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "TRAIN_FILE", "EVAL_FILE", "DB_URL", "MCP_URL", "AGENTRL_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(words) == 0
    return capsys.readouterr().out


def test_a_flag_without_a_default_says_what_happens_without_it() -> None:
    for flag in FLAGS.values():
        assert (flag.default is None) == (flag.info.unset is not None), flag.name


def test_a_help_is_one_sentence_that_begins_with_its_subject_and_names_the_unit() -> None:
    units = ("tokens", "turns", "steps", "epochs", "size", "count")
    for flag in FLAGS.values():
        help = flag.info.help
        assert len(help.split()) > 2 and not help.endswith((".", ",", ":")), flag.name
        assert (flag.type is bool) == help.startswith("whether "), flag.name
        assert ". " not in help and "default" not in help.replace("defaults of its", ""), flag.name
        if flag.name.endswith(("_seconds", "_timeout")):
            assert "seconds" in help, flag.name
        elif flag.type is int and flag.name.endswith(units) and flag.name.startswith("max_"):
            assert help.startswith(("largest number of ", "number of ")), flag.name


def test_a_misspelt_name_in_a_table_of_flags_fails_when_it_is_read() -> None:
    with pytest.raises(KeyError, match="there is no flag --max_turn'"):
        flags_named("max_turns", "max_turn")


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_paper_sets_is_a_flag(loss: str) -> None:
    assert in_force([Layer("command line", {"loss_calculator": loss})]).keys() == FLAGS.keys()


def test_bounds_stand_at_the_flag() -> None:
    said = {name: flag.bounds for name, flag in FLAGS.items() if flag.bounds}
    assert said["gae_lambda"] == said["inf_mem_ratio"] == "lie between 0 and 1"
    assert said["adam_beta1"] == "be at least 0 and below 1"
    assert said["adam_epsilon"] == "be above 0" and said["max_turns"] == "be at least 1"
    assert FLAGS["inf_mem_ratio"].check(0.5) is None
    for name, value in (
        ("inf_mem_ratio", 0),
        ("gae_gamma", 1.5),
        ("rollout_rs_threshold_lower", 2),
    ):
        with pytest.raises(ConfigError, match=f"--{name} {value}: must "):
            config_of({name: value})


@pytest.mark.parametrize("columns", [100, 60])
def test_the_help_lists_every_flag_once_and_fits(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = train_parser().format_help()
    assert all(len(line) <= min(columns, 80) for line in text.splitlines())
    listed = re.findall(r"^  (?:-h, )?--([\w-]+)", text, re.MULTILINE)
    assert sorted(listed) == sorted([*FLAGS, "help", "config"])
    assert "None" not in text and "loss_calculater" not in text
    words = " ".join(text.split())
    assert "turns of a trajectory (default: 200)" in words
    assert "below 1 of the importance ratio (paper of GRPO: 0.2)" in words


def test_no_help_loads_torch_or_is_wider_than_80_columns() -> None:
    program = (
        "import sys\nfrom agentrl.cli import VERBS, main\n"
        "for verb in VERBS: assert main([verb, '--help']) == 0\n"
        "assert not {'torch', 'transformers', 'pymongo'} & {*sys.modules}"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    assert max(map(len, ended.stdout.decode().splitlines())) <= 80


def test_a_launch_s_help_has_what_preset_demo_and_environment_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(printed(capsys, "launch", "minirl", "--help").split())
    assert "turns of a trajectory (demo: 6)" in text and "(minirl: 128)" in text
    assert "(paper of MINIRL: 0.27)" in text
    monkeypatch.setenv("MODEL", "mine")
    monkeypatch.setenv("DB_URL", "mongodb://me:hush@db/")
    text = " ".join(printed(capsys, "launch", "minirl", "--help", "--max_turns", "9").split())
    assert "(environment MODEL: mine)" in text and "(command line: 9)" in text
    assert "tokens of one turn (default: 8192)" in text
    assert "hush" not in text and "mongodb://***@db/" in text


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["--max-turns", "9"], ["--max_turns", "9"]),
        (["--max_turns=9"], ["--max_turns", "9"]),
        (["--bf16"], ["--bf16", "true"]),
        (["--bf16=yes"], ["--bf16", "true"]),
        (["--no_enable_sampling"], ["--enable_sampling", "false"]),
        (["--no-enable-sampling"], ["--enable_sampling", "false"]),
        (["--loss_calculater", "OPO"], ["--loss_calculator", "OPO"]),
        (["--minimal_advantage", "-1e-3"], ["--minimal_advantage=-0.001"]),
        (["--max_turns", "3", "--max_turns", "9"], ["--max_turns", "9"]),
    ],
)
def test_further_spellings_of_a_flag_are_taken(words: list[str], config: list[str]) -> None:
    assert parse_config(words) == parse_config(config) != parse_config([])


def test_flags_travel_to_other_processes_as_they_are() -> None:
    values = {
        "minimal_advantage": -1e-5, "learning_rate": 1 / 3, "system_prompt": "--be nice",
        "bf16": False, "mcp_manager_url": "", "seed": -3,
    }  # fmt: skip
    layer = Layer("command line", values)
    assert parse_config(as_words([layer])) == config_of(merged([layer]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["config", "demo", "--max_turn", "3"],
         "agentrl config: unknown flag --max_turn: did you mean --max_turns? "
         "`agentrl config --help` and `agentrl train --help` list them all"),
        (["eval", "demo", "--chekpoint", "3"],
         "agentrl eval: unknown flag --chekpoint: did you mean --checkpoint? "
         "`agentrl eval --help` and `agentrl train --help` list them all"),
        (["launch", "grpo", "demo", "--lerning-rate=1"],
         "agentrl launch: unknown flag --lerning-rate: did you mean --learning_rate? "
         "`agentrl launch grpo --help` lists them all"),
        (["export", "a", "b", "--frobnicate"],
         "agentrl export: unknown flag --frobnicate: `agentrl export --help` lists them all"),
        (["sample", "--max_turns", "3", "4"],
         "agentrl sample: '4' belongs to no flag: `agentrl sample --help` lists them all"),
        (["config", "demo", "--new_context", "discard_al"],
         "agentrl config: --new_context discard_al: not known (did you mean discard_all?); known: "
         "disabled, discard_all_tools, discard_all"),
        (["config", "demo", "--preset", "gpro"],
         "agentrl config: --preset gpro: not known (did you mean grpo?); known: grpo, minirl"),
        (["sample", "--bf16", "maybe"], "agentrl sample: --bf16 maybe: must be true or false"),
        (["sample", "--run_name", "demo"],
         "agentrl sample: DB_URL or --db_connection_string is needed: a sampler joins a run that "
         "is in a database (`DB_URL=mongodb://HOST:27017 agentrl sample --run_name demo`)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_with_what_was_meant(
    words: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == sentence + "\n"


@pytest.mark.parametrize(
    "words",
    [["sample"], ["launch", "grpo", "demo"], ["eval", "demo"], ["config", "demo"], ["memory"],
     ["plan"], ["rescore", "demo", "--scorer", "f1"], ["doctor"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_the_helps_that_an_error_names_list_what_the_verb_takes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--no_such_flag_at_all"]) == 2
    named = re.findall(r"`agentrl ([\w ]+) --help`", capsys.readouterr().err)
    for help in named:
        with suppress(SystemExit):  # argparse's own help ends the process
            assert cli.main([*help.split(), "--help"]) == 0
    listed = capsys.readouterr().out
    assert ("--max_tokens" if words == ["doctor"] else "--max_turns") in listed


def test_the_hint_names_the_script_that_was_called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_COMMAND", "./grpo_example.sh")
    assert cli.main(["launch", "grpo", "demo", "--max_turn", "1"]) == 2
    assert "`./grpo_example.sh --help` lists them all" in capsys.readouterr().err


def written(folder: Path, text: str) -> str:
    file = folder / "run.yml"
    file.write_text(text)
    return str(file)


def test_a_file_s_flags_lie_under_those_of_the_environment_and_the_command_line(
    tmp_path: Path,
) -> None:
    file = written(
        tmp_path,
        "loss_calculater: MINIRL\nmax-turns: 3\nmax_tokens: 500\ntrain_file: a.jsonl\n"
        "bf16: yes\nlearning_rate: 1e-5\nseed: null\neval_file:\n"
        "mcp_allow_tools: [search, 'files.*']\npreferred_sampling_params: {temperature: 0.5}\n",
    )
    environment = {"MODEL": "mine", "TRAIN_FILE": "b.jsonl"}
    flags = ["--max_tokens", "600", "--config", file]
    stack = plan_stack(PRESETS["grpo"], "demo", flags, read_deployment(environment), Inventory())
    config = stack.config
    assert (config.loss.loss_calculator, config.sampling.max_turns) == ("MINIRL", 3)
    assert (config.sampling.max_tokens, config.data.train_file) == (600, "b.jsonl")
    assert config.compute.bf16 and config.optimizer.learning_rate == 1e-5
    assert config.agent.mcp_allow_tools == "search,files.*" and config.temperature == 0.5
    assert (config.run.seed, config.data.eval_file) == (42, None)
    assert "--config" not in stack.flags and parse_config(stack.flags) == config
    assert stack.origins["max_turns"] == f"file {file}"
    assert stack.origins["train_file"] == "environment TRAIN_FILE"
    assert stack.origins["max_tokens"] == "command line"
    assert parse_config(["--max_turns", "4", "--config", file]).sampling.max_turns == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_turn: 3", "unknown flag max_turn: did you mean max_turns?"),
        ("max_turns: many", "max_turns many: must be a whole number"),
        ("weight_decay: .inf", "weight_decay inf: must be a finite number"),
        ("learning_rate: .nan", "learning_rate nan: must be a finite number"),
        ("max_turns: 1.5", "max_turns 1.5: must be a whole number"),
        ("max_turns: [1]", "max_turns: must be a single value, and is a list"),
        ("bf16: {a: 1}", "bf16: must be a single value, and is a mapping"),
        ("mcp_allow_tools: ['a,b']", "mcp_allow_tools: must be a list of texts without commas"),
        ("- max_turns", "must be lines of `flag: value`"),
        ("max_turns: [", "not YAML"),
    ],
)
def test_a_wrong_line_of_a_file_is_one_sentence_with_file_and_key(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", file])
    assert file in str(error.value) and sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none.yml: cannot be read \(No such file"):
        parse_config(["--config", str(tmp_path / "none.yml")])


@pytest.mark.parametrize("loss", ["DAPO", "Dr.GRPO", "GSPO", "MINIRL", "PPO"])
def test_what_a_paper_has_is_said_as_the_trainer_takes_it(loss: str) -> None:
    around_sampler = ["--proximal_policy", "behaviour"]
    for flags in (
        [],
        ["--epsilon", "0.1", *around_sampler],
        ["--token_level_loss", "false"],
        ["--strict_in_bound", "true", *([] if loss == "MINIRL" else around_sampler)],
    ):
        config = parse_config(["--loss_calculator", loss, *flags])
        held = in_force([Layer("command line", {"loss_calculator": loss}), _layer(flags)])
        below, above = config.loss.clip_range
        assert (1 - below, above - 1) == pytest.approx(
            (held["epsilon"].value, held["clip_ratio_high"].value)
        )
        assert held["proximal_policy"].value == config.loss.centre
        assert held["advantage"].value == config.reward.advantage
        assert held["normalize_advantages"].value == config.loss.normalizes_advantages
        averages = "token" if held["token_level_loss"].value else "sequence"
        summed = held["skip_length_normalization"].value
        assert config.loss.normalisation == ("constant" if summed else averages)


def _layer(flags: Sequence[str]) -> Layer:
    read = {
        name[2:]: FLAGS[name[2:]].read(text)
        for name, text in zip(flags[::2], flags[1::2], strict=True)
    }
    return Layer("command line", read)


def test_config_says_what_is_in_force_and_who_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MCP_URL", "http://me:hush@tools/mcp")
    file = written(tmp_path, "max_tokens: 500\n")
    flags = ["--config", "run.yml", "--max_turns", "3", "--mcp_auth_token", "hush"]
    text = printed(capsys, "config", "demo", *flags)
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    for line in (
        ["max_turns", "command line", "3"],
        ["max_tokens", "file run.yml", "500"],
        ["mcp_manager_url", "environment MCP_URL", "http://***@tools/mcp"],
        ["mcp_auth_token", "command line", "(not shown)"],
        ["num_generations", "demo", "8"],
        ["loss_calculator", "grpo", "GRPO"],
        ["epsilon", "paper of GRPO", "0.2"],
    ):
        assert line in lines
    assert "seed" not in text and "hush" not in text and file
    assert ["seed", "default", "42"] in [
        re.split(r"\s{2,}", line.strip())
        for line in printed(capsys, "config", "demo", "--all").splitlines()
    ]


@pytest.mark.parametrize("form", ["--yaml", "--json"])
@pytest.mark.parametrize("everything", [[], ["--all"]])
def test_what_config_prints_gives_the_same_run_again(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    everything: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [
        "--max_turns", "3", "--chat_template_kwargs", '{"enable_thinking": false}', "--bf16",
        "--minimal_advantage", "-1e-5", "--mcp_auth_token", "hush", "--system_prompt", "a: b\n'c'",
    ]  # fmt: skip
    text = printed(capsys, "config", "demo", "--preset", "minirl", form, *everything, *flags)
    assert "hush" not in text and isinstance(yaml.safe_load(text), dict)
    file = written(tmp_path, text)
    if form == "--json":
        assert json.loads(text)["chat_template_kwargs"] == {"enable_thinking": False}

    def launched(*flags: str) -> Config:
        preset, nowhere = PRESETS["minirl"], read_deployment({})
        return plan_stack(preset, "demo", [*flags], nowhere, Inventory()).config

    assert launched("--config", file, "--mcp_auth_token", "hush") == launched(*flags)


def test_of_a_launched_run_config_has_what_it_was_launched_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stack = plan_stack(
        PRESETS["minirl"], "demo", ["--max_turns", "3"], read_deployment({}), Inventory()
    )
    record = LaunchRecord("minirl", stack.flags, origins=stack.origins)
    (tmp_path / "output" / "demo").mkdir(parents=True)
    write_launch(tmp_path / "output" / "demo", record)
    text = printed(capsys, "config", "demo", "--max_tokens", "300")
    assert "as it was launched with minirl" in text
    assert re.search(r"max_turns +launch: command line +3\b", text)
    assert re.search(r"loss_calculator +launch: minirl +MINIRL\b", text)
    assert re.search(r"max_tokens +command line +300\b", text)
    assert yaml.safe_load(printed(capsys, "config", "demo", "--yaml")) == {
        "run_name": "demo", "max_turns": 3,
    }  # fmt: skip


def test_the_page_of_flags_is_as_the_code_has_them() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from flags_page import PAGES, rewritten
    finally:
        sys.path.pop(0)
    assert {page.name for page in PAGES} == {"flags.md", "checkpoints.md", "from-agentrl.md"}
    for path, lines in PAGES.items():
        page = path.read_text(encoding="utf-8")
        assert page == rewritten(page, lines()), f"{path}: run `python scripts/flags_page.py`"


def test_the_engine_s_types_are_those_that_serve_offers() -> None:
    from typing import get_args

    from agentrl.inference.engine.config import DType

    assert get_args(DType) == DTYPES
