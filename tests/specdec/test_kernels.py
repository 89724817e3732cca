"""The kernels on trees, of random numbers and of p, against torch's operations: interpreted, and on a GPU."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import DraftTree, SamplingParams, Topology
from specdec.acceptance import certain
from specdec.host import without_looking
from specdec.random import Purpose, request_key, uniforms
from specdec.sampling import SamplingTensors
from specdec.sampling import distribution as by_torch
from tests.specdec.test_sampling import PARAMS, by_sorting, logits, rows, tensors
from tests.verifiers.cases import complete
from tests.verifiers.test_greedy_walk import greedy_rounds

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("specdec.kernels.trees")
kernel = pytest.importorskip("specdec.kernels.sampling")
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")


def check_tables(parents: Tensor, max_depth: int, device: str) -> None:
    expected = Topology(parents, max_depth, parents.shape[1])
    found = kernels.connected(parents.to(device), max_depth)
    for name in ("depth", "deeper", "ancestors", "ancestor_words"):
        assert torch.equal(found[name].cpu(), getattr(expected, name)), name


def wide_trees(rows: int, width: int, seed: int) -> Tensor:
    """Random parents; those of a row are near its nodes or far above, so that trees are deep or flat."""
    generator = torch.Generator().manual_seed(seed)
    node = torch.arange(width).expand(rows, -1)
    back = (torch.rand(rows, width, generator=generator) * torch.tensor([3.0, width])[:rows, None]).long()
    return (node - 1 - back).clamp(min=0).where(node > 0, -1)


def check_trees(device: str) -> None:
    """Of one word of marks and of three, of a program and of several; with loose bounds, and with bounds too small."""
    for width, max_depth in ((1, 0), (5, 4), (60, 8), (130, 12)):
        check_tables(wide_trees(2, width, width), max_depth, device)
    check_tables(wide_trees(1, 20, 1).expand(3, -1), 19, device)


def check_walks(device: str, examples: int) -> None:
    @settings(max_examples=examples, phases=[Phase.generate])
    @given(st.sampled_from(["tree", "chain", "paths"]).flatmap(greedy_rounds))
    def check(case: tuple[DraftTree, Tensor]) -> None:
        tree, following = case
        expected = certain(tree, following)
        given_to = (tree.tokens, tree.parents, tree.valid, following)
        path, count, accepted, next_token = (
            each.cpu() for each in kernels.walk(*(each.to(device) for each in given_to), tree.max_depth)
        )
        assert torch.equal(path, expected.path) and torch.equal(count, expected.num_accepted)
        assert torch.equal(accepted, expected.expected_accepted) and torch.equal(next_token, expected.next_token)

    check()


@interpreted
def test_tables_levels_walks_and_numbers_are_those_of_torch() -> None:
    check_trees("cpu")
    check_fronts("cpu")
    check_walks("cpu", 15)
    check_numbers("cpu")


def check_fronts(device: str) -> None:
    """Of a few offers and of many, of rows that share their scores, and of tokens that cannot be drawn."""
    generator = torch.Generator().manual_seed(0)
    for nodes, scored, children, width in ((1, 1, 3, 2), (10, 10, 10, 10), (4, 1, 5, 9), (3, 3, 2, 8)):
        worth = -torch.rand(2, nodes, generator=generator, dtype=torch.float64)
        log_probs = -5 * torch.rand(2, scored, children, generator=generator)
        log_probs[0, 0, -1] = -torch.inf
        tokens = torch.randint(0, 99, (2, scored, children), generator=generator)
        scores = (worth[:, :, None] + log_probs).flatten(1)
        best, place = scores.topk(min(width, scores.shape[1]), dim=-1)
        chosen = tokens.expand(-1, nodes, -1).flatten(1).gather(1, place)
        expected = scores, best, chosen, place + 31, place // children + 4
        given_to = (each.to(device) for each in (worth, log_probs, tokens))
        found = kernels.front(*given_to, width, 4, 30)
        certain = expected[1] > -torch.inf  # which of the others come first is open
        assert torch.equal(found[0].cpu(), expected[0]) and torch.equal(found[1].cpu(), expected[1])
        for one, other in zip(found[2:], expected[2:], strict=True):
            assert torch.equal(one.cpu()[certain], other[certain])


@pytest.mark.gpu
def test_the_compiled_kernels_do_the_same() -> None:
    check_trees("cuda")
    check_walks("cuda", 200)
    check_fronts("cuda")
    check_numbers("cuda")
    check_parameters("cuda")
    check_what_went_wrong("cuda")
    generator = torch.Generator().manual_seed(1)
    for vocab in (1, 31, 32_000, 151_936):
        values = torch.randn(4, 2, vocab, generator=generator) * torch.tensor([0.5, 2.0, 5.0, 0.0])[:, None, None]
        for step in (None, 0.25):
            values = values if step is None else (values / step).round() * step
            check_kept(values, torch.tensor([0, 50, 0, 7]), torch.tensor([0.9, 1.0, 0.31, 0.77]), "cuda")


def drawn(device: str, *, by_kernel: bool) -> list[Tensor]:
    keys = torch.tensor([request_key(seed, 5) for seed in (0, 1, -7)], device=device)
    rounds = torch.tensor([0, 3, 10**6], device=device)
    with pytest.MonkeyPatch.context() as patch, without_looking():
        patch.setattr("specdec.random.usable", lambda tensor: by_kernel)
        found = [uniforms(keys, rounds, purpose, count) for purpose in Purpose for count in (1, 2, 700)]
        return [each.cpu() for each in (*found, uniforms(keys[::2], rounds[::2], Purpose.DRAFT, 9))]


def check_numbers(device: str) -> None:
    assert all(map(torch.equal, drawn(device, by_kernel=True), drawn("cpu", by_kernel=False)))


def by_kernel(values: Tensor, state: SamplingTensors, device: str = "cpu") -> Tensor:
    parameters = (state.temperature, state.top_k, state.top_p, state.min_p)
    return kernel.distribution(values.to(device), *(each.to(device) for each in parameters)).cpu()


def check_kept(values: Tensor, top_k: Tensor, top_p: Tensor, device: str) -> None:
    """The very tokens that a stable sort keeps, but for sums of mass that are p up to rounding; and their p."""
    expected, margin = by_sorting(values, top_k, top_p)
    clear, one = margin > 1e-6, torch.ones_like(top_p)
    found = kernel.distribution(*(each.to(device) for each in (values, one, top_k, top_p, 0 * one))).cpu()
    kept = expected.softmax(-1)
    assert torch.equal((found > 0)[clear], (kept > 0)[clear])
    torch.testing.assert_close(found[clear], kept[clear], atol=1e-6, rtol=1e-5)
    assert float((found.sum(-1) - 1).abs().max()) < 1e-5


def check_parameters(device: str, params: Sequence[SamplingParams] = PARAMS) -> None:
    """Every parameter, greedy rows among sampled ones, parts of wider tables, rows that are the same everywhere."""
    values = logits(len(params), 1, seed=2)
    wide = torch.nn.functional.pad(values, (0, 3), value=9.0)
    part, alike = wide.to(device)[..., : values.shape[2]], values[::3].to(device, torch.bfloat16).expand(-1, 2, -1)
    for table, state in ((part, tensors(params)), (alike, tensors(params[::3]))):
        expected, found = by_torch(table.cpu().float(), state), by_kernel(table, state, device)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        if table.dtype is torch.float32:  # others have ties, of which min-p keeps all
            assert torch.equal(found > 0, expected > 0)


def check_what_went_wrong(device: str) -> None:
    values = torch.tensor([[1.0, torch.nan, 3.0], [1.0, torch.inf, 0.0], [-torch.inf] * 3, [1.0, -torch.inf, 0.0]])
    table = values[None].expand(2, -1, -1)
    state = tensors([SamplingParams(temperature=1.0, top_p=0.9), SamplingParams()])
    found = by_kernel(table, state, device)
    assert found[0, :3].isnan().all() and found[0, 3].isfinite().all() and float(found[0, 3, 1]) == 0
    assert torch.equal(found[1], by_torch(table, state)[1]), "a greedy row gets its arg-max, NaN before all numbers"


@interpreted
@pytest.mark.parametrize(
    "params", [[PARAMS[i] for i in (1, 4, 6, 9, 12, 13)], complete(PARAMS, strong=False)], ids=["few", "all"]
)
def test_the_kernel_is_the_distribution(params: Sequence[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> None:
    check_what_went_wrong("cpu")
    monkeypatch.setattr(kernel, "_PIECE", 32)  # two pieces to a row, the last one not full
    monkeypatch.setattr(kernel, "_COLUMNS", 4)
    check_parameters("cpu", params)


KEPT = (
    (64, torch.zeros(1, 1, 9), 0.999999),  # all stay
    (4, torch.zeros(1, 1, 9), 0.5),  # five of equal ones, in two pieces
    (64, torch.tensor([[[0.0, -60.0, -60.0, -9.0, -0.0]]]), 0.999999),
    (64, -3e38 * torch.ones(1, 1, 2), 0.999999),
    (64, 1e-3 * torch.randn(1, 1, 30, generator=torch.Generator().manual_seed(1)), 0.5),
)
"""Tokens per piece, logits and top-p: ties, supports of one token, p near 1, and numbers next to each other."""


def check_hard_cases() -> None:
    for block, values, top_p in KEPT:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "_PIECE", block)
            check_kept(values, torch.tensor([0]), torch.tensor([top_p]), "cpu")


@interpreted
def test_the_same_tokens_stay_as_by_sorting() -> None:
    @settings(max_examples=2, deadline=None)
    @given(rows(), st.sampled_from([4, 64]))
    def check(case: tuple[Tensor, Tensor, Tensor], block: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "_PIECE", block)
            check_kept(*case, "cpu")

    check()
    check_hard_cases()
    one, zero, every = torch.ones(1), torch.zeros(1), torch.tensor([0])
    none = kernel.distribution(torch.tensor([[[0.0, 1.0, 1.0]]]), one, every, zero, zero)
    assert none.tolist() == [[[0.0, 1.0, 0.0]]], "the most probable token stays, whatever p is in float32"
    # p that is next to 1, and a tail of 80 tokens that has less than that together: mass is counted to 2^-40.
    tail = torch.full((1, 1, 81), -20.0)
    tail[0, 0, 7] = 0
    mass = tail.double().softmax(-1)[0, 0]
    expected = 1 + int((mass[7] + torch.arange(80) * mass[0] < 1 - 2**-24).sum())
    found = kernel.distribution(tail, one, every, torch.tensor([1 - 2**-24]), zero)
    assert int((found > 0).sum()) == expected and 1 < expected < 81


class _NoTies:
    """Says that no piece has a token that equals the last one that stays."""

    def __getitem__(self, grid: object) -> Callable:
        return lambda *given, **sizes: given[7].zero_()


@interpreted
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_count_equal", lambda right: _NoTies()),
        ("_STEPS", lambda right: right - 1),
        ("_UNIT", lambda right: triton.language.constexpr(8.0)),
        ("_NEGLIGIBLE", lambda right: triton.language.constexpr(0.5)),
    ],
)
def test_a_kernel_that_keeps_others_is_found(name: str, wrong: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, name, wrong(getattr(kernel, name)))
    with pytest.raises(AssertionError):
        check_hard_cases()
