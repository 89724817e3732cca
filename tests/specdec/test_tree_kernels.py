"""The kernels on trees, and of random numbers, against torch's operations: in Triton's interpreter, and on a GPU."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import DraftTree, Topology
from specdec.acceptance import certain
from specdec.drafting.builders.expansion import _front
from specdec.host import without_looking
from specdec.random import Purpose, request_key, uniforms
from tests.verifiers.test_greedy_walk import differing, greedy_rounds

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("specdec.kernels.trees")

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")
TABLES = ("depth", "deeper", "ancestors", "ancestor_words")


def check_tables(parents: Tensor, max_depth: int, device: str, *, steps: int | None = None) -> None:
    expected = Topology(parents, max_depth, parents.shape[1])
    found = kernels.connected(parents.to(device), max_depth if steps is None else steps)
    for name in TABLES:
        assert torch.equal(found[name].cpu(), getattr(expected, name)), name


def wide_trees(rows: int, width: int, seed: int) -> Tensor:
    """Random parents; those of a row are near its nodes or far above, so that trees are deep or flat."""
    generator = torch.Generator().manual_seed(seed)
    node = torch.arange(width).expand(rows, -1)
    back = (torch.rand(rows, width, generator=generator) * torch.tensor([3.0, width])[:rows, None]).long()
    return (node - 1 - back).clamp(min=0).where(node > 0, -1)


def check_trees(device: str) -> None:
    """Of one word of marks and of three, of a part of a program's nodes and of several programs; with loose bounds, and
    with nodes that are deeper than the bound."""
    for width, max_depth in ((1, 0), (5, 4), (60, 8), (130, 12)):
        check_tables(wide_trees(2, width, width), max_depth, device)
    check_tables(wide_trees(1, 20, 1).expand(3, -1), 19, device)


def check_walks(walks: Callable, device: str, examples: int) -> None:
    """Trees of one shape and row by row, with equal siblings and invalid nodes."""

    @settings(max_examples=examples, phases=[Phase.generate])
    @given(st.sampled_from(["tree", "chain", "paths"]).flatmap(greedy_rounds))
    def check(case: tuple[DraftTree, Tensor]) -> None:
        tree, following = case
        expected = certain(tree, following)
        given_to = (tree.tokens, tree.parents, tree.valid, following)
        path, count, accepted, next_token = (
            each.cpu() for each in walks(*(each.to(device) for each in given_to), tree.max_depth)
        )
        assert torch.equal(path, expected.path) and torch.equal(count, expected.num_accepted)
        assert torch.equal(accepted, expected.expected_accepted) and torch.equal(next_token, expected.next_token)

    check()


@interpreted
def test_the_tables_are_those_of_the_loops() -> None:
    check_trees("cpu")
    with pytest.raises(AssertionError):
        check_tables(wide_trees(1, 9, 0), 8, "cpu", steps=2)


def check_fronts(device: str, *, more: int = 0) -> None:
    """Of a few offers and of many, of rows that share their scores, and of tokens that cannot be drawn."""
    generator = torch.Generator().manual_seed(0)
    for nodes, scored, children, width in ((1, 1, 3, 2), (10, 10, 10, 10), (4, 1, 5, 9), (3, 3, 2, 8)):
        worth = -torch.rand(2, nodes, generator=generator, dtype=torch.float64)
        log_probs = -5 * torch.rand(2, scored, children, generator=generator)
        log_probs[0, 0, -1] = -torch.inf
        tokens = torch.randint(0, 99, (2, scored, children), generator=generator)
        expected = _front(worth, log_probs, tokens, width, 4, 30)
        given_to = (each.to(device) for each in (worth, log_probs, tokens))
        found = kernels.front(*given_to, width, 4, 30 + more)
        certain = expected[1] > -torch.inf  # which of the others come first is open
        assert torch.equal(found[0].cpu(), expected[0]) and torch.equal(found[1].cpu(), expected[1])
        for one, other in zip(found[2:], expected[2:], strict=True):
            assert torch.equal(one.cpu()[certain], other[certain])


@interpreted
def test_the_best_of_a_level_are_the_same() -> None:
    check_fronts("cpu")
    with pytest.raises(AssertionError):
        check_fronts("cpu", more=1)


@interpreted
def test_the_walk_ends_at_the_same_node() -> None:
    check_walks(kernels.walk, "cpu", 15)


def _too_short(tokens: Tensor, parents: Tensor, valid: Tensor, following: Tensor, max_depth: int) -> tuple:
    path, *rest = kernels.walk(tokens, parents, valid, following, max(max_depth - 1, 0))
    return torch.nn.functional.pad(path, (0, 1), value=-1), *rest


def _invalid_too(tokens: Tensor, parents: Tensor, valid: Tensor, following: Tensor, max_depth: int) -> tuple:
    return kernels.walk(tokens, parents, torch.ones_like(valid), following, max_depth)


@interpreted
@pytest.mark.parametrize("wrong", [_too_short, _invalid_too])
def test_wrong_walks_are_found(wrong: Callable) -> None:
    with pytest.raises(AssertionError):
        check_walks(wrong, "cpu", 25)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, wherever a kernel can take a tensor."""
    for name in ("topology", "acceptance"):
        monkeypatch.setattr(f"specdec.{name}.usable", lambda tensor: True)


@interpreted
def test_trees_use_the_kernels_where_they_can(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topology makes its tables in one launch, whichever is asked for first, and a verdict is one launch."""
    calls = []
    for name in ("connected", "walk"):
        made = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *given, name=name, made=made: calls.append(name) or made(*given))
    parents = wide_trees(2, 12, 3)
    for first in ("depth", "ancestors", "ancestor_words"):
        calls.clear()
        topology = Topology(parents, 11, 11)
        for name in (first, *TABLES):
            assert getattr(topology, name) is not None
        assert calls == ["connected"]
    following = torch.zeros_like(parents)
    tree = DraftTree.build(torch.randint(0, 2, parents.shape), parents)
    verdict = certain(tree, following)
    assert calls[-1] == "walk"
    monkeypatch.undo()
    assert differing(verdict, certain(tree, following)) == []


@pytest.mark.gpu
def test_the_compiled_kernels_do_the_same() -> None:
    check_trees("cuda")
    check_walks(kernels.walk, "cuda", 200)
    check_fronts("cuda")


def drawn(device: str, *, by_kernel: bool, later: int = 0) -> list[Tensor]:
    """Numbers of several requests, rounds and purposes: fewer than a program makes, and more."""
    keys = torch.tensor([request_key(seed, 5) for seed in (0, 1, -7)], device=device)
    rounds = torch.tensor([0, 3, 10**6], device=device) + later
    with pytest.MonkeyPatch.context() as patch, without_looking():
        patch.setattr("specdec.random.usable", lambda tensor: by_kernel)
        found = [uniforms(keys, rounds, purpose, count) for purpose in Purpose for count in (1, 2, 700)]
        return [each.cpu() for each in (*found, uniforms(keys[::2], rounds[::2], Purpose.DRAFT, 9))]


def equal(device: str, *, later: int = 0) -> bool:
    pairs = zip(drawn(device, by_kernel=True, later=later), drawn("cpu", by_kernel=False), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@interpreted
def test_the_numbers_are_those_of_torch() -> None:
    assert equal("cpu") and not equal("cpu", later=1)


@pytest.mark.gpu
def test_the_compiled_kernel_makes_the_same_numbers() -> None:
    assert equal("cuda")
