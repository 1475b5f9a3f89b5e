"""A pair of answers as one tree: the prompt once, each answer with its own mask and branches."""

import numpy as np
import pytest

from agentrl.databases.growing_tree import GrowingTree
from agentrl.databases.pair_tree import pair_tree
from agentrl.databases.token_tree import Node, TokenTree


def answer(prompt: list[int], said: list[int]) -> TokenTree:
    return TokenTree.line(prompt + said, mask=[0] * len(prompt) + [1] * len(said))


def paths(tree: TokenTree, column: str) -> list[list[float]]:
    return [tree.take(tree.places(path))[column].tolist() for path in tree.paths()]


def test_the_prompt_is_stored_once_and_each_answer_has_its_sign() -> None:
    tree = pair_tree(answer([1, 2, 3], [10, 11]), answer([1, 2, 3], [10, 12, 13]))
    assert tree.nodes == (Node(0, 3, -1), Node(3, 5, 0), Node(5, 8, 0))
    assert paths(tree, "ids") == [[1, 2, 3, 10, 11], [1, 2, 3, 10, 12, 13]]
    assert paths(tree, "mask") == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert paths(tree, "advantages") == [[0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1]]


def test_what_both_answers_begin_with_belongs_to_each() -> None:
    """An answer that is the beginning of the other, so that its tokens are all shared."""
    tree = pair_tree(answer([1, 2], [10]), answer([1, 2], [10, 11]))
    assert paths(tree, "ids") == [[1, 2, 10], [1, 2, 10, 11]]
    assert tree["mask"].sum() == 3


def branching(prompt: list[int], turns: list[list[int]]) -> TokenTree:
    """Turns that each stand behind the prompt, in a segment of their own."""
    growing = GrowingTree()
    for number, turn in enumerate(turns):
        growing.begin(*((0, len(prompt)) if number else (None, 0)))
        if not number:
            growing.append(prompt)
        growing.append(turn, {"mask": 1})
    return growing.tree()


@pytest.mark.parametrize("swapped", [False, True])
def test_answers_with_branches_keep_them(swapped: bool) -> None:
    many, one = branching([1, 2, 3, 4], [[10], [11, 12]]), answer([1, 2, 3, 9], [13])
    tree = pair_tree(*((one, many) if swapped else (many, one)))
    expected = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11, 12], [1, 2, 3, 9, 13]]
    assert sorted(paths(tree, "ids")) == expected
    assert len(tree) == 3 + 1 + 1 + 2 + 1 + 1  # 1, 2, 3 once
    signs = {line[-1] for line in paths(tree, "advantages")}
    assert signs == {1.0, -1.0}


def test_a_prompt_that_is_all_of_both_first_nodes_is_one_node() -> None:
    tree = pair_tree(branching([1, 2], [[10], [11]]), branching([1, 2], [[12], [13]]))
    assert tree.nodes[0] == Node(0, 2, -1)
    assert tree.parents == (-1, 0, 0, 0, 0)


def test_answers_to_different_prompts_are_a_forest() -> None:
    tree = pair_tree(answer([1, 2], [10]), answer([3, 2], [10]))
    assert tree.parents == (-1, -1)
    assert np.array_equal(tree["advantages"], [0, 0, 1, 0, 0, -1])


def test_a_context_that_begins_anew_keeps_its_root() -> None:
    anew = TokenTree.concat([answer([1, 2], [10]), answer([7], [11])])
    tree = pair_tree(anew, answer([1, 2], [12]))
    assert paths(tree, "ids") == [[1, 2, 10], [7, 11], [1, 2, 12]]


def test_answers_that_are_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="are the same"):
        pair_tree(answer([1], [10]), answer([1], [10]))
