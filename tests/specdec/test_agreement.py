"""What the first process sends is what the others go on with, whatever they would have done themselves.

The processes are objects here, one after the other, and what is sent lies in a list. ``test_tensor_parallel.py`` starts
real ones.
"""

from collections import deque
from dataclasses import fields

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


def sent(processes: tuple[Agreement, Agreement], mine: DraftTree, theirs: DraftTree, *, fixed: bool) -> DraftTree:
    """The tree that the other process goes on with, which is the first one's."""
    first, other = processes
    assert first.on_tree(mine, fixed=fixed) is mine or fixed
    found = other.on_tree(theirs, fixed=fixed)
    for name in ("tokens", "parents", "valid"):
        assert torch.equal(getattr(found, name), getattr(mine, name)), name
    assert (found.max_depth, found.max_children) == (mine.max_depth, mine.max_children)
    return found


ROOTS = DraftTree.root_only(torch.tensor([3, 4]))
OTHERS = {
    "other nodes": free([FORK, CHAIN], seed=2),
    "fewer nodes": free([[-1, 0], [-1, 0]], seed=2),
    "more nodes": free([[*CHAIN, 3, 4], [*FORK, 3, 4]], seed=2),
    "no draft": ROOTS,
}


@pytest.mark.parametrize("theirs", OTHERS)
def test_trees_of_any_shape(processes: tuple[Agreement, Agreement], theirs: str) -> None:
    sent(processes, free([CHAIN, FORK], seed=1), OTHERS[theirs], fixed=False)


def test_no_draft_at_the_first_process_is_none_at_the_others(processes: tuple[Agreement, Agreement]) -> None:
    sent(processes, ROOTS, free([CHAIN, FORK], seed=1), fixed=False)


def test_trees_of_one_size_whose_parents_differ(processes: tuple[Agreement, Agreement]) -> None:
    sent(processes, free([CHAIN, FORK], seed=1), free([FORK, CHAIN], seed=2), fixed=True)


def test_trees_of_one_shape_keep_their_shape_and_their_q(processes: tuple[Agreement, Agreement]) -> None:
    shape, probs = TreeShape.branching(2, 1), torch.full((2, 5, 8), 1 / 8)
    tree, theirs = (
        DraftTree.from_shape(shape, torch.full((2, 5), token), sampling=DraftSampling.IID, draft_probs=probs)
        for token in (1, 2)
    )
    found = sent(processes, tree, theirs, fixed=True)
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
    theirs = Verdict(*(torch.zeros_like(getattr(mine, each.name)) for each in fields(mine)))
    first.on_verdict(mine)
    found = other.on_verdict(theirs)
    for each in fields(mine):
        value, wanted = getattr(found, each.name), getattr(mine, each.name)
        assert torch.equal(value, wanted) and value.dtype is wanted.dtype, each.name
