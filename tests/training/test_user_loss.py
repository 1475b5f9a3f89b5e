"""A loss from a user's file: it is tried at the start, and what is wrong is one sentence."""

from pathlib import Path

import pytest
from loss_inputs import gradient, inputs
from tiny import linear_rows
from trainer_run import Run

from agentrl.configs import ConfigError, LossConfig
from agentrl.training.losses import BatchTotals, Scope
from agentrl.training.step.objective import Objective
from agentrl.training.trainer import main

HEAD = """
import torch
from agentrl import (
    LossConfig, LossInputs, Scope, TokenLoss, depends_on, sequence_mean, token_ratio,
)

"""

LINEAR = """
def loss(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    ratio = token_ratio(inputs)
    _, high = config.clip_range
    return TokenLoss(-2 * ratio * inputs.advantages, ratio.detach(), ratio < 0, ratio > high)
"""

OF_A_SEQUENCE = """
def loss(inputs, config):
    ratio = sequence_mean(token_ratio(inputs), inputs)
    none = torch.zeros_like(inputs.mask)
    return TokenLoss(-ratio * inputs.advantages, ratio.detach(), none, none)
"""


def objective(folder: Path, text: str, **flags: object) -> Objective:
    file = folder / "mine.py"
    file.write_text(HEAD + text, encoding="utf-8")
    return Objective(LossConfig(loss_calculator=f"{file}:loss", **flags))  # type: ignore[arg-type]


def test_a_loss_of_a_file_is_trained_with_all_layers(tmp_path: Path) -> None:
    mine = objective(tmp_path, LINEAR, epsilon=0.2, strict_in_bound=True, advantage_decay=0.5)
    given = inputs([1.0, 1.1, 9.0], [1.0, 1.0, 1.0], staleness=[0, 1, 0])
    share, terms = mine.share(given, BatchTotals(tokens=3, sequences=1))
    assert gradient(share * 3, given) == [-2.0, -1.1, 0.0]
    assert terms.clipped_high.tolist() == [False, False, True]
    assert mine.scope is Scope.TOKEN


def test_a_loss_says_how_much_of_the_batch_it_depends_on(tmp_path: Path) -> None:
    marked = OF_A_SEQUENCE.replace("def loss", "@depends_on(Scope.SEQUENCE)\ndef loss")
    assert objective(tmp_path, marked).scope is Scope.SEQUENCE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(inputs, config): ...", "has no function 'loss'"),
        ("loss = 3", "has no function 'loss'"),
        ("def loss(inputs, config):\n    return 1 / 0", "fails: ZeroDivisionError"),
        ("def loss(inputs):\n    return 1", "fails: TypeError"),
        ("def loss(inputs, config):\n    return inputs.logprobs.sum()", "must return a TokenLoss"),
        (LINEAR.replace("-2 * ratio", "-2 * ratio.detach()"), "carry no gradient"),
        (OF_A_SEQUENCE, "decorate the function with @depends_on(Scope.SEQUENCE or BATCH)"),
        (
            "@depends_on(Scope.SEQUENCE)\n"
            + LINEAR.lstrip().replace("* inputs.advantages", "* inputs.advantages.mean()"),
            r"decorate the function with @depends_on(Scope.BATCH)",
        ),
    ],
)
def test_what_is_wrong_with_a_loss_is_said_before_the_run_begins(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        objective(tmp_path, text)
    assert message in str(error.value)
    assert str(error.value).startswith("--loss_calculator")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no such Python file"):
        Objective(LossConfig(loss_calculator="nowhere/mine.py:loss"))


@pytest.mark.slow
def test_a_run_is_trained_by_a_users_loss(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + LINEAR, encoding="utf-8")
    rows = linear_rows(4)
    run.add(rows)
    loss = f"{tmp_path}/mine.py:loss"
    assert main(run.flags("--enable_sampling", "false", "--loss_calculator", loss)) == 0
    (line,) = run.metrics()
    assert line["n_rows"] == len(rows) and line["grad_norm"] > 0
    assert line["clip_fraction_high"] > 0
