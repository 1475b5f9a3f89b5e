"""A chosen and a rejected answer to one prompt as one token tree: a row of preference training.

The prompt that both begin with is stored once. Each answer keeps its own mask and its own branches,
also where both say the same. `advantages` has 1 on what is trained of the chosen answer and -1 on
what is trained of the rejected one.
"""

import numpy as np

from agentrl.databases.token_tree import COLUMNS, Node, TokenTree, common_prefix


def pair_tree(chosen: TokenTree, rejected: TokenTree) -> TokenTree:
    """The tree of a pair; `mask` of each answer is 1 on what is trained.

    Raises `ValueError`, with one sentence that continues after the row's place, if both answers are
    the same.
    """
    same = chosen.nodes == rejected.nodes and all(
        np.array_equal(chosen[name], rejected[name]) for name in ("ids", "mask")
    )
    if same:
        raise ValueError("has a chosen and a rejected answer that are the same")
    sides = [
        tree.with_columns(advantages=np.where(tree["mask"] == 1, sign, 0.0))
        for tree, sign in ((chosen, 1.0), (rejected, -1.0))
    ]
    shared = _shared_prompt(*sides)
    if not shared:
        return TokenTree.concat(sides)
    nodes = [Node(0, shared, -1)]
    for tree in sides:
        nodes += _below(tree, shared, nodes[-1].end, len(nodes))
    columns = {name: np.concatenate([sides[0][name], sides[1][name][shared:]]) for name in COLUMNS}
    return TokenTree(tuple(nodes), columns)


def _shared_prompt(chosen: TokenTree, rejected: TokenTree) -> int:
    """How many tokens both begin with, of which neither trains one. 0 if either has two roots."""
    if any(tree.parents.count(-1) > 1 for tree in (chosen, rejected)):
        return 0
    prompts = []
    for tree in (chosen, rejected):
        first = tree.nodes[0].end
        trained = np.flatnonzero(tree["mask"][:first])
        prompts.append(tree["ids"][: trained[0] if len(trained) else first])
    return common_prefix(*prompts)


def _below(tree: TokenTree, shared: int, start: int, number: int) -> list[Node]:
    """The nodes of `tree` without its first `shared` tokens, below node 0.

    Their tokens begin at `start`, and they are numbered from `number`.
    """
    move = start - shared
    first, *others = tree.nodes
    if first.end == shared:  # it is node 0 itself
        nodes, numbers = [], [0]
    else:
        nodes, numbers = [Node(start, first.end + move, 0)], [number]
    for node in others:
        numbers.append(number + len(nodes))
        nodes.append(Node(node.start + move, node.end + move, numbers[node.parent]))
    return nodes
