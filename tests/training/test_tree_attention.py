"""Attention over forests against a dense mask in float64."""

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.training.attention import AllGather, TreeLayout, tree_attention
from agentrl.training.attention.blocks import SMALLEST, blocks
from agentrl.training.attention.flash import FlashKernel, cuda_flash_kernel
from agentrl.training.attention.flex import flex_tree_attention
from agentrl.training.parallel import make_mesh

HEADS, KV_HEADS = 6, 2


@st.composite
def forests(draw: st.DrawFn) -> TreeLayout:
    """Up to nine nodes of up to seven tokens, single tokens and several roots among them."""
    parents: list[int] = []
    way: list[int] = []  # to the last node: the only places for the next one
    for node in range(draw(st.integers(1, 9))):
        keep = draw(st.integers(0, len(way)))
        way = [*way[:keep], node]
        parents.append(way[-2] if len(way) > 1 else -1)
    lengths = [draw(st.sampled_from([1, 1, 2, 5, 5, 7])) for _ in parents]
    return TreeLayout(parents, lengths)


def dense_mask(layout: TreeLayout) -> Tensor:
    """Which query sees which key, from the parents alone."""
    above = [{node} for node in range(len(layout.parents))]
    for node, parent in enumerate(layout.parents):
        if parent >= 0:
            above[node] |= above[parent]
    node_of = [node for node, length in enumerate(layout.lengths) for _ in range(length)]
    rows = [
        [key <= query and node_of[key] in above[node_of[query]] for key in range(len(node_of))]
        for query in range(len(node_of))
    ]
    return torch.tensor(rows)[slice(*layout.queries)]


def inputs(layout: TreeLayout, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(layout.n_tokens)
    shapes = ((HEADS, layout.n_queries), (KV_HEADS, layout.n_tokens), (KV_HEADS, layout.n_tokens))
    # as a model makes them: the heads of a token side by side
    return [
        torch.randn(1, tokens, heads, width, generator=generator).transpose(1, 2)
        for heads, tokens in shapes
    ]


def output_and_gradients(layout: TreeLayout, tensors: list[Tensor], *, dense: bool) -> list[Tensor]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors)
    if dense:
        groups = HEADS // KV_HEADS
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k.repeat_interleave(groups, 1),
            v.repeat_interleave(groups, 1),
            attn_mask=dense_mask(layout),
        )
    else:
        out = tree_attention(q, k, v, layout)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), (q, k, v))]


def assert_exact(layout: TreeLayout, *, width: int = 8) -> None:
    tensors = inputs(layout, width)
    ours = output_and_gradients(layout, tensors, dense=False)
    double = [tensor.double() for tensor in tensors]
    expected = output_and_gradients(layout, double, dense=True)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)


@given(forests())
@settings(max_examples=settings.default.max_examples * 3 // 5)
def test_any_forest_is_exact_in_output_and_gradients(layout: TreeLayout) -> None:
    assert_exact(layout)


@given(forests(), st.data())
@settings(max_examples=settings.default.max_examples * 3 // 5)
def test_any_slice_of_the_queries_is_exact_too(layout: TreeLayout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.n_tokens - 1))
    end = data.draw(st.integers(start + 1, layout.n_tokens))
    part = layout.restrict(start, end)
    assert_exact(part)
    assert part.positions.tolist() == layout.positions[start:end].tolist()


@given(forests())
def test_pairs_and_visibility_are_those_of_the_mask(layout: TreeLayout) -> None:
    mask = dense_mask(layout)
    assert layout.pairs == mask.sum()
    token = torch.arange(layout.n_tokens)
    until = torch.from_numpy(layout.visible_until)
    assert torch.equal(mask, (token <= token[:, None]) & (token[:, None] < until))
    assert layout.positions.tolist() == (mask.sum(1) - 1).tolist()


@st.composite
def long_forests(draw: st.DrawFn) -> TreeLayout:
    """Nodes that the CPU kernel divides, of equal and of other lengths, and some of the queries."""
    lengths = [draw(st.sampled_from([63, 64, 65, 128, 200, 257])) for _ in range(3)]
    layout = TreeLayout(draw(st.sampled_from([[-1, 0, 0], [-1, -1, -1], [-1, 0, 1]])), lengths)
    start = draw(st.integers(0, layout.n_tokens - 1))
    return layout.restrict(start, draw(st.integers(start + 1, layout.n_tokens)))


@given(long_forests())
@settings(deadline=None, max_examples=5)
def test_divided_nodes_are_exact(layout: TreeLayout) -> None:
    assert_exact(layout)


@given(long_forests())
@settings(deadline=None, max_examples=20)
def test_blocks_hold_each_pair_once_and_a_causal_one_of_each_query_first(
    layout: TreeLayout,
) -> None:
    seen = torch.zeros(layout.n_queries, layout.n_tokens, dtype=torch.int64)
    for block in blocks(layout):
        assert not block.causal or block.queries <= SMALLEST
        for offset in range(0, block.count * block.stride, block.stride):
            queries = slice(block.query + offset, block.query + offset + block.queries)
            keys = slice(block.key + offset, block.key + offset + block.keys)
            assert block.causal or (seen[queries].sum(1) > 0).all()
            pairs = torch.ones_like(seen[queries, keys])
            seen[queries, keys] += pairs.tril() if block.causal else pairs
    assert torch.equal(seen, dense_mask(layout).long())


def test_squares_of_one_size_are_one_call() -> None:
    found = [(b.causal, b.count, b.queries, b.keys) for b in blocks(TreeLayout([-1], [1024]))]
    assert found == [
        (True, 16, 64, 64),
        (False, 1, 512, 512),
        (False, 2, 256, 256),
        (False, 4, 128, 128),
        (False, 8, 64, 64),
    ]


@pytest.mark.parametrize("width", [1, 5, 64, 80, 256])
def test_heads_may_have_any_width(width: int) -> None:
    assert_exact(TreeLayout([-1, 0, 0], [20, 40, 40]), width=width)


def test_packed_chains_are_causal_calls_only() -> None:
    layout = TreeLayout([-1, -1, -1, -1], [5, 7, 7, 3])
    assert layout.spans == ()
    assert [(run.query, run.count, run.length) for run in layout.runs] == [
        (0, 1, 5),
        (5, 2, 7),
        (19, 1, 3),
    ]


def test_bfloat16_loses_no_more_than_its_own_rounding() -> None:
    layout = TreeLayout([-1, 0, 1, 2, 0], [30, 20, 10, 10, 20])
    tensors = [tensor.bfloat16() for tensor in inputs(layout, 16)]
    ours = output_and_gradients(layout, tensors, dense=False)
    expected = output_and_gradients(layout, [t.double() for t in tensors], dense=True)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("parents", "lengths"), [([0], [1]), ([-1, 1], [1, 1]), ([-1, 0, -1, 0], [1] * 4), ([-1], [0])]
)
def test_nodes_in_another_order_are_refused(parents: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="depth-first"):
        TreeLayout(parents, lengths)


def flash_by_definition(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, causal: bool,
    scale: float,
) -> list[tuple[slice, slice, Tensor]]:  # fmt: skip
    """Of each piece: its queries, its keys, its scores [H, queries, keys]."""
    pieces = []
    groups = q.shape[1] // k.shape[1]
    bounds = zip(query_ends, query_ends[1:], key_ends, key_ends[1:], strict=False)
    for q_start, q_end, k_start, k_end in bounds:
        queries, keys = slice(q_start, q_end), slice(k_start, k_end)
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys].repeat_interleave(groups, 1))
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        pieces.append((queries, keys, scores * scale))
    return pieces


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, longest_query: int,
    longest_key: int, dropout: float, causal: bool, debug: bool, *, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What aten's operator of the same arguments returns, as far as it is used."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for queries, keys, scores in flash_by_definition(q, k, v, query_ends, key_ends, causal, scale):
        assert scores.shape[1] <= longest_query and scores.shape[2] <= longest_key
        values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        lse[:, queries] = scores.logsumexp(-1)
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, query_ends: Tensor,
    key_ends: Tensor, longest_query: int, longest_key: int, dropout: float, causal: bool,
    state: Tensor, unused: Tensor, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Likewise: P = exp(scores - lse), dS = P (dO v - rowsum(dO O))."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups = q.shape[1] // k.shape[1]
    for queries, keys, scores in flash_by_definition(q, k, v, query_ends, key_ends, causal, scale):
        p = (scores - lse[:, queries, None]).exp()
        do, values = grad[queries], v[keys].repeat_interleave(groups, 1)
        ds = p * (
            torch.einsum("qhd,khd->hqk", do, values) - (do * out[queries]).sum(-1).T.unsqueeze(-1)
        )
        dq[queries] += scale * torch.einsum(
            "hqk,khd->qhd", ds, k[keys].repeat_interleave(groups, 1)
        )
        for gradient, by_head in (
            (dk, scale * torch.einsum("hqk,qhd->khd", ds, q[queries])),
            (dv, torch.einsum("hqk,qhd->khd", p, do)),
        ):
            gradient[keys] += by_head.unflatten(1, (-1, groups)).sum(2)
    return dq, dk, dv


@given(forests(), st.data())
@settings(max_examples=settings.default.max_examples * 3 // 5)
def test_the_calls_for_cuda_are_exact_given_what_flash_attention_is(
    layout: TreeLayout, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, layout.n_tokens - 1))
    layout = layout.restrict(start, data.draw(st.integers(start + 1, layout.n_tokens)))
    width = data.draw(st.sampled_from([5, 8]))
    tensors = inputs(layout, width)
    expected = output_and_gradients(layout, [t.double() for t in tensors], dense=True)
    kernel = FlashKernel(flash_forward, flash_backward)
    q, k, v = tensors
    out, lse = kernel.forward(q, k, v, layout, width**-0.5)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    gradients = kernel.backward(weights, q, k, v, out, lse, layout, width**-0.5)
    for one, other in zip((out, *gradients), expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)


def test_a_forest_takes_as_many_cuda_calls_as_it_is_deep() -> None:
    layout = TreeLayout([-1, 0, 1, 1, 0, -1, 5, 5], [4, 3, 2, 2, 3, 5, 1, 1])
    called: list[bool] = []

    def counting(*args: object, **options: object) -> tuple[Tensor, Tensor]:
        called.append(bool(args[8]))
        return flash_forward(*args, **options)  # type: ignore[arg-type]

    FlashKernel(counting, flash_backward).forward(*inputs(layout, 8), layout, 1.0)
    assert called == [True, False, False]


@pytest.mark.parametrize("width", [20, 64, 128])
def test_shapes_and_types_fit_atens_cuda_operators(width: int) -> None:
    layout = TreeLayout([-1, 0, 1, 1, 0, -1, 5, 5], [4, 3, 2, 2, 3, 5, 1, 1])
    q, k = (
        torch.empty(1, layout.n_tokens, heads, width, device="meta", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS)
    )
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    kernel = cuda_flash_kernel()
    out, lse = kernel.forward(q, k, k, layout, 1.0)
    gradients = kernel.backward(out, q, k, k, out, lse, layout, 1.0)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@given(forests(), st.data())
@settings(deadline=None, max_examples=5)
def test_block_masks_are_those_of_the_forest(layout: TreeLayout, data: st.DataObject) -> None:
    layout = layout.restrict(data.draw(st.integers(0, layout.n_tokens - 1)), layout.n_tokens)
    q, k, v = inputs(layout, 16)
    (expected, *_) = output_and_gradients(layout, [q, k, v], dense=True)
    out = flex_tree_attention(q, k, v, layout, 0.25)
    torch.testing.assert_close(out, expected.detach(), atol=2e-5, rtol=2e-5)


def test_the_layers_of_a_pass_share_the_layouts_of_their_parts_of_the_line(monkeypatch) -> None:
    line = AllGather(make_mesh(Accelerator(cpu=True)).cp_group)
    layout = TreeLayout([-1, 0, 0], [6, 5, 5])
    q, k, v = inputs(layout, 16)
    made = []
    build = TreeLayout.__init__
    monkeypatch.setattr(
        TreeLayout, "__init__", lambda self, *args: (made.append(args), build(self, *args))[1]
    )
    outs = [
        line.attend(q, k, v, layout, lambda key, value: (key, value), None)
        for _ in range(8)  # layers
    ]
    assert len(made) == line.parts_each
    monkeypatch.undo()
    torch.testing.assert_close(outs[-1], tree_attention(q, k, v, layout))
