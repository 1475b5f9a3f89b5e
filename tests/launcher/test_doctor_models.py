"""What `agentrl doctor --model` says of model families: parser, exactness, what is wrong."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "chat"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "tool_calls"))

from families import TRL_TEMPLATES, tokenizer_of

from agentrl.launcher.doctor import main


def said_of(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    template: Path | None = None,
    *flags: str,
) -> tuple[bool, str]:
    """Whether the model is in order, and the line about it. `template`: another than its own."""
    tokenizer_of(family).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes}))
    (folder / "model.safetensors").touch()  # which the line about the model does not need
    if template is not None:
        text = template.read_text(encoding="utf-8")
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    main(["--model", str(folder), *flags])
    [line] = [line for line in capsys.readouterr().out.splitlines() if " model: " in line]
    return line.startswith("ok "), line


def test_a_model_whose_conversations_extend_is_called_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fine, line = said_of(tmp_path, capsys, "qwen2.5")
    assert fine and "its tool calls are read by the parser qwen25; " in line
    assert "multi-turn training is exact: in 150 random conversations" in line


def test_calls_that_no_parser_reads_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fine, line = said_of(tmp_path, capsys, "gpt-oss", TRL_TEMPLATES / "muse_glimmer.jinja")
    assert not fine
    assert "the chat template writes tool calls as 'to=probe_tool<|message|><atem:" in line
    assert "which no parser reads: a model that writes them so makes no calls" in line


def test_a_parser_that_cannot_read_the_template_s_calls_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fine, line = said_of(tmp_path, capsys, "qwen2.5", None, "--tool_call_parser", "glm45")
    assert not fine
    assert "--tool_call_parser glm45 cannot read the tool calls" in line and "qwen25" in line


def test_a_template_s_own_error_keeps_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ raise_exception('Give me at least three messages.') }}")
    fine, line = said_of(tmp_path, capsys, "qwen2.5", own)
    assert not fine and "Give me at least three messages." in line
