"""Operations that a rule takes, none of them a look at a value; and which verifiers take which drafters."""

import re
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import verifiers
from specdec import Drafter, DraftSampling, DraftTree, Exactness, TreeShape, Verifier
from specdec.acceptance import accept
from specdec.host import without_looking
from tests.components import DRAFTERS
from tests.launches import Work, counted
from tests.models import tiny_model
from tests.verifiers.cases import IID, SWOR, TOP, takes
from verifiers import ThresholdVerifier, TransportVerifier

SHAPES = {
    "chain of 4": TreeShape.chain(4),
    "3 x 2 x 1": TreeShape.branching(3, 2, 1),
    "12 nodes": TreeShape.from_paths(
        [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0,) * 4, (0,) * 5]
    ),
    "8 paths of 8": TreeShape.branching(8, *[1] * 7),
}
"""Trees by name. That of 12 nodes has 4 children at its root, is 5 deep, and is uneven, as trained tree shapes are."""
VOCAB = 32


def drafted(
    shape: TreeShape, law: DraftSampling, *, per_row: bool = False, batch: int = 3
) -> tuple[DraftTree, torch.Tensor]:
    """Return random drafts and p, of a shape whose nodes were all drawn by one law."""
    generator = torch.Generator().manual_seed(0)
    nodes = shape.num_nodes + 1
    p, q = torch.rand(2, batch, nodes, VOCAB, generator=generator).softmax(-1)
    tokens = torch.randint(0, VOCAB, (batch, nodes), generator=generator)
    # Without replacement, q may run out of tokens: drafters say which siblings exist.
    marked = law is SWOR and not shape.is_chain
    valid = torch.ones_like(tokens, dtype=torch.bool) if marked else None
    drawn = {"sampling": law, "draft_probs": None if law is TOP else q, "valid": valid}
    if not per_row:
        return DraftTree.from_shape(shape, tokens, **drawn), p
    parents = torch.tensor([shape.parents]).repeat(batch, 1)
    deep, wide = shape.max_depth, shape.max_children
    tree = DraftTree.build(tokens, parents, **drawn, max_depth=deep, max_children=wide)
    _ = tree.depth, tree.ancestors  # the verify forward has made them
    return tree, p


def work_of(rule: Verifier, tree: DraftTree, p: torch.Tensor) -> Work:
    """Return the operations of one acceptance, not in inference mode, which would hide some of them."""
    uniforms = torch.full((len(p), 2), 0.5, dtype=torch.float64)
    with torch.no_grad(), counted() as work:
        accept(rule, tree, p, uniforms)
    return work


NAMED: dict[str, type[Verifier]] = {name: getattr(verifiers, name) for name in verifiers.__all__}
RULES = {name: kind() for name, kind in NAMED.items() if kind is not TransportVerifier}
RULES |= {"ThresholdVerifier": ThresholdVerifier(accumulated=0.8)}
"""All but the one that solves its programs on the host: it is a reference, and says so."""

CHAIN, TREE, UNEVEN, PATHS = SHAPES
BOUNDS = {
    "TargetWalkVerifier": {(SWOR, CHAIN): 40, (SWOR, TREE): 50, (SWOR, PATHS): 50},
    # Without replacement a rank takes one more, the division by what is left of q.
    "RejectionVerifier": {
        (IID, CHAIN): 40, (TOP, PATHS): 50, (IID, TREE): 50, (IID, UNEVEN): 60, (IID, PATHS): 60, (SWOR, TREE): 60,
        (SWOR, UNEVEN): 65, (SWOR, PATHS): 80,
    },
    "BlockVerifier": {(TOP, CHAIN): 40, (IID, CHAIN): 60},
    "KSeqVerifier": {(IID, TREE): 150, (IID, UNEVEN): 150, (IID, PATHS): 150},
    "TraversalVerifier": {
        (TOP, PATHS): 50, (IID, CHAIN): 60, (IID, TREE): 90, (IID, UNEVEN): 115, (IID, PATHS): 110, (SWOR, TREE): 125,
        (SWOR, UNEVEN): 150, (SWOR, PATHS): 150,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Code takes the branches that it would take where a look at a value makes the host wait."""
    with without_looking():
        yield


@pytest.mark.parametrize("rule", BOUNDS)
def test_a_round_takes_few_operations(rule: str) -> None:
    for (law, shape), bound in BOUNDS[rule].items():
        work_of(RULES[rule], *drafted(SHAPES[shape], law))  # tables of a shape are made once
        assert work_of(RULES[rule], *drafted(SHAPES[shape], law)).launches <= bound, f"{law.name}, {shape}"


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_looks_at_a_value(rule: str) -> None:
    for law in (TOP, IID, SWOR):
        for name, per_row in ((CHAIN, False), (TREE, False), (TREE, True), (PATHS, True)):
            if law in RULES[rule].samplings and takes(RULES[rule], SHAPES[name]):
                work_of(RULES[rule], *drafted(SHAPES[name], law))  # tables of a shape are made once
                work = work_of(RULES[rule], *drafted(SHAPES[name], law, per_row=per_row))
                assert work.synchronizations == 0, f"{name}, {law.name}: {dict(work.reads)}"


@pytest.mark.parametrize("per_row", [False, True])
def test_a_batch_judged_in_parts_is_judged_alike(per_row: bool) -> None:
    """Where p has too many entries for one go."""
    tree, p = drafted(SHAPES[TREE], IID, per_row=per_row, batch=5)
    uniforms = torch.rand(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = accept(RULES["RejectionVerifier"], tree, p, uniforms)
    with mock.patch("specdec.acceptance.MOST_ENTRIES", 2 * p[0].numel()):
        parts = accept(RULES["RejectionVerifier"], tree, p, uniforms)
    for name in ("path", "num_accepted", "next_token", "valid"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    torch.testing.assert_close(whole.expected_accepted, parts.expected_accepted)


def accepts(rule: type[Verifier], drafter: Drafter) -> bool:
    """A verifier's declarations, written once more."""
    return (
        all(law in rule.samplings for law in drafter.laws)
        and (drafter.is_chain or not rule.chain_only)
        and (drafter.is_chain or drafter.is_paths or not rule.paths_only)
        and (drafter.has_leaf_probs or not rule.needs_leaf_probs)
    )


def test_a_refusal_names_verifiers_that_accept() -> None:
    model = tiny_model(vocab_size=16, layers=2)
    drafters = [make(model) for make in DRAFTERS.values()]
    for name, rule in NAMED.items():
        for drafter in drafters:
            if accepts(rule, drafter):
                rule().check(drafter)
                continue
            with pytest.raises(ValueError, match=rf"{name} .* {type(drafter).__name__}\b.*: use \w+") as refusal:
                rule().check(drafter)
            named = re.findall(r"\w+Verifier\b", str(refusal.value).split(": use ")[1])
            assert named and name not in named
            for other in named:
                assert accepts(NAMED[other], drafter), f"{other} does not take what {refusal.value}"
                assert NAMED[other].exactness is Exactness.EXACT
