"""Which ways of stopping a draft leave the output the target's: enumerated, with those that do not as mutants.

A node may exist or not for any reason that is settled before its own token is drawn, never for a reason that looks at
that token or at later ones (Leviathan et al.; DSpark, arXiv 2607.05147, appendix A, whose counterexample is here).
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from verifiers.block import BlockVerifier, TraversalVerifier
from verifiers.kseq import KSeqVerifier
from verifiers.rejection import RejectionVerifier

VOCAB, LENGTH = 3, 3
Law = Callable[[tuple[int, ...]], Tensor]
Keep = Callable[[tuple[int, ...], Law], int]
"""How many of the drawn tokens are drafted, given all that were drawn."""


def table(seed: int) -> Law:
    """A distribution after every sequence of tokens, in float64."""

    def law(path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
        return (1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)

    return law


P, Q = table(1), table(2)


def output_law(rule: Verifier, p: Law, q: Law, depth: int, keep: Keep) -> dict[tuple[int, ...], float]:
    """The law of the first ``LENGTH`` tokens after one round, and plain decoding behind it."""
    law = dict.fromkeys(itertools.product(range(len(p(()))), repeat=LENGTH), 0.0)
    for drawn in itertools.product(range(len(p(()))), repeat=depth):
        weight = 1.0
        for i, token in enumerate(drawn):
            weight *= float(q(drawn[:i])[token])
        count = keep(drawn, q)
        paths = [drawn[:i] for i in range(depth + 1)]
        tree = DraftTree.from_shape(
            TreeShape.chain(depth),
            torch.tensor([[0, *drawn]]),
            sampling=DraftSampling.IID,
            draft_probs=torch.stack([q(path) for path in paths])[None],
            valid=(torch.arange(depth + 1) <= count)[None],
        )
        target = torch.stack([p(path) for path in paths])[None]
        stops = rule.laws(tree, target).stop[0]
        for stop in range(count + 1):
            following = rule.laws(tree, target).after(torch.tensor([stop]))[0]
            for token in range(len(following)):
                emitted = (*drawn[:stop], token)
                begun = weight * float(stops[stop]) * float(following[token] / following.sum())
                for rest in itertools.product(range(len(following)), repeat=max(LENGTH - len(emitted), 0)):
                    whole = (*emitted, *rest)
                    chance = begun
                    for i in range(len(emitted), LENGTH):
                        chance *= float(p(whole[:i])[whole[i]])
                    law[whole[:LENGTH]] += chance
    return law


def bias(rule: Verifier, keep: Keep, *, p: Law = P, q: Law = Q, depth: int = 2) -> float:
    """The total variation between the output's law and the target's."""
    law = output_law(rule, p, q, depth, keep)
    wanted = {}
    for path in law:
        wanted[path] = 1.0
        for i, token in enumerate(path):
            wanted[path] *= float(p(path[:i])[token])
    return sum(abs(law[path] - wanted[path]) for path in law) / 2


def _until(stops: Callable[[tuple[int, ...], Law], bool]) -> Keep:
    """Drafts until ``stops`` says so of the tokens before the next slot."""

    def keep(drawn: tuple[int, ...], q: Law) -> int:
        return next((i for i in range(len(drawn)) if stops(drawn[:i], q)), len(drawn))

    return keep


LEGAL: dict[str, Keep] = {
    "always": _until(lambda before, q: False),
    "never": _until(lambda before, q: True),
    "after an unlikely token, which is kept": _until(
        lambda before, q: bool(before) and bool(q(before[:-1])[before[-1]] < 0.4)
    ),
    "before an uncertain slot": _until(lambda before, q: bool(q(before).max() < 0.5)),
    "by the token before": _until(lambda before, q: before[-1:] == (0,)),
}

ILLEGAL: dict[str, Keep] = {
    "the unlikely token is dropped": lambda drawn, q: next(
        (i for i in range(len(drawn)) if q(drawn[:i])[drawn[i]] < 0.4), len(drawn)
    ),
    "the token behind decides": lambda drawn, q: 2 if drawn[1] == 0 else 1,
    "all or nothing, by the first token": lambda drawn, q: 2 if drawn[0] == 0 else 0,
}

RULES = [RejectionVerifier, BlockVerifier, TraversalVerifier, KSeqVerifier]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reason", LEGAL)
def test_stopping_for_what_is_known_before_changes_nothing(rule: type[Verifier], reason: str) -> None:
    assert bias(rule(), LEGAL[reason]) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reason", ILLEGAL)
def test_stopping_for_what_was_drawn_does(rule: type[Verifier], reason: str) -> None:
    assert bias(rule(), ILLEGAL[reason]) > 0.005


def test_the_counterexample_of_dspark() -> None:
    """The draft is verified whole after A and not at all after B: B comes half as often as it should."""

    def p(path: tuple[int, ...]) -> Tensor:
        return torch.tensor([0.7, 0.3], dtype=torch.float64)

    def q(path: tuple[int, ...]) -> Tensor:
        return torch.tensor([0.5, 0.5], dtype=torch.float64)

    law = output_law(RejectionVerifier(), p, q, 2, lambda drawn, q: 2 if drawn[0] == 0 else 0)
    first = sum(chance for path, chance in law.items() if path[0] == 0)
    assert first == pytest.approx(0.85, abs=1e-12)
