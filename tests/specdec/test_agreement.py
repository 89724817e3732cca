"""What the first process sends is what the others go on with, whatever they would have done themselves.

The processes are objects here, one after the other, and what is sent lies in a list. ``test_tensor_parallel.py`` starts
real ones.
"""

from collections import deque
from dataclasses import replace

import pytest
import torch
import torch.distributed
from torch import Tensor

from specdec.target.agreement import Agreement, GroupAgreement
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling, Verdict

CHAIN = [-1, 0, 1, 2]
FORK = [-1, 0, 0, 1]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> tuple[Agreement, Agreement]:
    """The first process, which has to be asked first, and another one."""
    sent: deque[Tensor] = deque()

    def broadcast(tensor: Tensor, group: object, group_src: int) -> None:
        assert group_src == 0
        if group == "first":
            sent.append(tensor.clone())
            return
        received = sent.popleft()
        assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype), "a collective of two sizes hangs"
        tensor.copy_(received)

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0 if group == "first" else 1)
    return GroupAgreement("first"), GroupAgreement("other")


def free(parents: list[list[int]], *, seed: int) -> DraftTree:
    """Trees that differ from row to row."""
    torch.manual_seed(seed)
    above = torch.tensor(parents)
    return DraftTree.build(torch.randint(50, above.shape), above, valid=torch.rand(above.shape) < 0.8)


def assert_same(one: DraftTree, other: DraftTree) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.parents, other.parents)
    assert torch.equal(one.valid, other.valid)
    assert (one.max_depth, one.max_children) == (other.max_depth, other.max_children)


def test_trees_of_one_size_whose_parents_differ(processes: tuple[Agreement, Agreement]) -> None:
    first, other = processes
    tree = free([CHAIN, FORK], seed=1)
    first.on_tree(tree, fixed=True)
    assert_same(other.on_tree(free([FORK, CHAIN], seed=2), fixed=True), tree)


@pytest.mark.parametrize(
    "theirs",
    [
        free([FORK, CHAIN], seed=2),
        free([[-1, 0], [-1, 0]], seed=2),
        free([[*CHAIN, 3, 4], [*FORK, 3, 4]], seed=2),
        DraftTree.root_only(torch.tensor([3, 4])),
    ],
    ids=["other nodes", "fewer nodes", "more nodes", "no draft"],
)
def test_trees_of_any_shape(processes: tuple[Agreement, Agreement], theirs: DraftTree) -> None:
    first, other = processes
    tree = free([CHAIN, FORK], seed=1)
    assert first.on_tree(tree, fixed=False) is tree
    assert_same(other.on_tree(theirs, fixed=False), tree)


def test_no_draft_at_the_first_process_is_none_at_the_others(processes: tuple[Agreement, Agreement]) -> None:
    first, other = processes
    tree = DraftTree.root_only(torch.tensor([3, 4]))
    first.on_tree(tree, fixed=False)
    assert_same(other.on_tree(free([CHAIN, FORK], seed=1), fixed=False), tree)


def test_trees_of_one_shape_keep_their_shape_and_their_q(processes: tuple[Agreement, Agreement]) -> None:
    first, other = processes
    shape, probs = TreeShape.branching(2, 1), torch.full((2, 5, 8), 1 / 8)
    tree, theirs = (
        DraftTree.from_shape(shape, torch.full((2, 5), token), sampling=DraftSampling.IID, draft_probs=probs)
        for token in (1, 2)
    )
    first.on_tree(tree, fixed=True)
    found = other.on_tree(theirs, fixed=True)
    assert_same(found, tree)
    assert found.is_static and found.draft_probs is probs


def test_verdicts(processes: tuple[Agreement, Agreement]) -> None:
    first, other = processes
    mine = Verdict(
        path=torch.tensor([[1, 2], [1, -1]]),
        num_accepted=torch.tensor([2, 1]),
        expected_accepted=torch.tensor([1.25, 0.1], dtype=torch.float64),
        next_token=torch.tensor([2**40 + 1, 7]),  # exact in float64
        valid=torch.tensor([True, False]),
    )
    theirs = replace(
        mine,
        path=torch.tensor([[2, -1], [-1, -1]]),
        num_accepted=torch.tensor([1, 0]),
        expected_accepted=torch.zeros(2, dtype=torch.float64),
        next_token=torch.tensor([5, 5]),
        valid=torch.tensor([True, True]),
    )
    first.on_verdict(mine)
    found = other.on_verdict(theirs)
    for name in ("path", "num_accepted", "expected_accepted", "next_token", "valid"):
        value, wanted = getattr(found, name), getattr(mine, name)
        assert torch.equal(value, wanted) and value.dtype is wanted.dtype, name
