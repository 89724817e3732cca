"""FLy: its law against all patterns of matches, exact where switched off, and that it needs the whole window."""

import itertools

import pytest
import torch

from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.tree import DraftTree, TreeShape
from specdec.types import Exactness
from tests.verifiers.cases import BIASED, EXACT, IID, TOP
from verifiers import TargetWalkVerifier
from verifiers.fly import FLyVerifier


def literal(match: list[float], unsure: list[bool], window: int) -> list[float]:
    """The law of the last accepted position, over all patterns of matches."""
    stop = [0.0] * (len(match) + 1)
    for pattern in itertools.product([True, False], repeat=len(match)):
        chance = 1.0
        for matched, p in zip(pattern, match, strict=True):
            chance *= p if matched else 1 - p
        accepted = 0
        while accepted < len(match):
            after = pattern[accepted + 1 : accepted + 1 + window]
            if not pattern[accepted] and not (unsure[accepted] and len(after) == window and all(after)):
                break
            accepted += 1
        stop[accepted] += chance
    return stop


@pytest.mark.parametrize("window", [1, 2, 6])
@pytest.mark.parametrize("per_row", [False, True])
def test_the_law_is_that_of_all_patterns(window: int, per_row: bool) -> None:
    generator = torch.Generator().manual_seed(window)
    rows, depth, vocab = 4, 8, 5
    logits = 4 * torch.rand(rows, depth + 1, vocab, generator=generator, dtype=torch.float64) ** 2
    p = logits.softmax(-1)
    tokens = torch.randint(0, vocab, (rows, depth + 1), generator=generator)
    valid = torch.ones(rows, depth + 1, dtype=torch.bool)
    valid[1, 4:] = False
    shape = TreeShape.chain(depth)
    if per_row:
        tree = DraftTree.build(tokens, torch.tensor([shape.parents] * rows), valid=valid)
    else:
        tree = DraftTree.from_shape(shape, tokens, valid=valid)
    rule = FLyVerifier(window=window, threshold=0.8)
    laws = rule.laws(tree, p.where(valid[..., None], torch.nan))
    top = p.topk(3, -1).values
    top = top / top.sum(-1, keepdim=True)
    unsure = -(top * top.log()).sum(-1) / torch.tensor(3.0).log() > 0.8
    assert unsure.any() and not unsure.all()
    for row in range(rows):
        count = int(valid[row].sum()) - 1
        match = p[row, torch.arange(count), tokens[row, 1 : count + 1]].tolist()
        expected = literal(match, unsure[row, :count].tolist(), window) + [0.0] * (depth - count)
        torch.testing.assert_close(laws.stop[row], torch.tensor(expected, dtype=torch.float64))
    walk = TargetWalkVerifier().laws(tree, p)
    for node in range(depth + 1):
        stop = torch.full((rows,), node)
        torch.testing.assert_close(laws.after(stop)[valid[:, node]], walk.after(stop)[valid[:, node]])


def test_it_is_lossy_and_says_so() -> None:
    """And accepts more than the walk, but not where the draft is too short for the window."""
    rule, tables, shape = FLyVerifier(window=1, threshold=0.0), Tables.random(3, 3, seed=3), TreeShape.chain(3)
    assert rule.exactness is Exactness.LOSSY
    walk = enumerate_outcome(TargetWalkVerifier(), tables, shape, IID)
    result = enumerate_outcome(rule, tables, shape, IID)
    assert result.tv > BIASED and result.joint.sum().item() == pytest.approx(1, abs=1e-9)
    assert result.expected_accepted > walk.expected_accepted
    for exact in (FLyVerifier(window=1, threshold=1.0), FLyVerifier(window=3, threshold=0.0)):
        for laws in (IID, TOP):
            assert enumerate_outcome(exact, tables, shape, laws).tv < EXACT


def test_temperature_zero_is_greedy_matching() -> None:
    p = torch.zeros(1, 9, 4)
    p[0, :, 2] = 1
    tree = DraftTree.from_shape(TreeShape.chain(8), torch.tensor([[0, 2, 1, 2, 2, 2, 2, 2, 2]]))
    laws = FLyVerifier().laws(tree, p)
    assert laws.stop.tolist() == [[0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert torch.equal(laws.after(torch.tensor([1])), p[:, 1])


@pytest.mark.parametrize(("name", "value"), [("threshold", 1.5), ("window", 0), ("top", 1)])
def test_bad_settings(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        FLyVerifier(**{name: value})
