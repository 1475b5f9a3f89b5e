"""The trainer's logprobs of a row's tokens come back to the places that the tokens have in it."""

import numpy as np
import torch

from agentrl.databases.arrays import pack_floats
from agentrl.databases.documents import TrainedStep
from agentrl.databases.growing_tree import GrowingTree
from agentrl.databases.token_tree import TokenTree
from agentrl.databases.trained_logprobs import (
    trained_places,
    trainer_entropies,
    trainer_logprobs,
)
from agentrl.training.data.batch import collate_forest, placeholder
from agentrl.training.data.sequences import tree_sequences
from agentrl.training.step.kept_logprobs import KeptLogprobs


def branching(first: int) -> TokenTree:
    """Three segments, of which the later ones begin within the first; all ids are different."""
    ids = iter(range(first, first + 100))
    growing = GrowingTree()

    def add(count: int, mask: int) -> None:
        growing.append([next(ids) for _ in range(count)], {"mask": mask})

    root = growing.begin()
    for count, mask in ((3, 0), (2, 1), (2, 0), (3, 1)):
        add(count, mask)
    growing.begin(parent=root, shared=5)
    add(1, 0)
    add(2, 1)
    growing.begin(parent=root, shared=3)
    add(4, 1)
    return growing.tree()


def test_each_token_of_each_branch_has_its_own_and_placeholders_leave_none() -> None:
    trees = [
        branching(100),
        TokenTree.line([1, 2, 3], mask=[1, 0, 1]),  # its first token has no prediction
        branching(300),
    ]
    rows = [tree_sequences(tree) for tree in trees]
    sequences = [(number, each) for number, row in enumerate(rows) for each in row]
    kept = KeptLogprobs()
    # In any order and in micro-batches of their own.
    for number, sequence in reversed(sequences):
        batch = collate_forest([sequence], [number])
        said = -batch.targets.float()  # the logprob of a token is minus its id
        kept.add(batch.loss_inputs(said, batch.targets.float() / 256))
    nothing = placeholder()
    sevens = torch.full((len(nothing.targets),), 7.0)
    kept.add(nothing.loss_inputs(sevens, sevens))
    for tree, own in zip(trees, kept.of_rows(len(trees)), strict=True):
        mark = TrainedStep(step=1, trainer="t", fence=1, **own.pack())
        values, entropies = trainer_logprobs(tree, [mark]), trainer_entropies(tree, [mark])
        assert values is not None and entropies is not None
        expected = np.zeros(len(tree), dtype=np.float32)
        expected[trained_places(tree)] = -tree["ids"][trained_places(tree)]
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(entropies, -expected / 256)  # which float16 has exactly


def test_the_last_step_that_kept_them_counts_and_without_one_nothing_is_said() -> None:
    tree = TokenTree.line([5, 6, 7], mask=[0, 1, 1])
    marks = [
        TrainedStep(step=step, trainer="t", fence=1, logprobs=own and pack_floats(own))
        for step, own in ((1, [-1.0, -2.0]), (2, [-3.0, -4.0]), (3, None))
    ]
    values = trainer_logprobs(tree, marks)
    assert values is not None and values.tolist() == [0.0, -3.0, -4.0]
    assert trainer_logprobs(tree, marks[2:]) is None and trainer_entropies(tree, marks) is None
    assert KeptLogprobs().of_rows(2)[1].logprobs.tolist() == []
