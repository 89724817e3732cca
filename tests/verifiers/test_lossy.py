"""Lossy rules: their laws by hand and by enumeration."""

import itertools

import pytest
import torch

import verifiers.greedy_multipath
from specdec import DraftSampling, DraftTree, Exactness, TreeShape, Verifier
from specdec.checks.drafts import enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.coupling import winners
from tests.changed_rule import ChangedRule, emit_p
from tests.verifiers.cases import BIASED, EXACT, IID, SWOR, TOP, widest
from verifiers import CascadeVerifier, FLyVerifier, MixtureVerifier, NucleusVerifier, RejectionVerifier
from verifiers.longest_path import RelaxedTopKVerifier, TypicalVerifier
from verifiers.lossy import FuzzyVerifier, LenientVerifier, ThresholdVerifier
from verifiers.target_walk import TargetWalkVerifier
from verifiers.weighted_transport import WeightedTransportVerifier

RULES: dict[str, Verifier] = {
    "lenient": LenientVerifier(lenience=0.5),
    "nucleus": NucleusVerifier(mass=0.5),
    "single": ThresholdVerifier(single=0.3),
    "accumulated": ThresholdVerifier(accumulated=0.6),
    "relaxed top-k": RelaxedTopKVerifier(k=2),
    "fuzzy": FuzzyVerifier(threshold=0.4, divergence="total_variation"),
    "fuzzy, Kullback-Leibler": FuzzyVerifier(threshold=1.0, divergence="kl"),
    "fuzzy, Jensen-Shannon": FuzzyVerifier(threshold=0.3),
    "typical": TypicalVerifier(),
    "fly": FLyVerifier(window=1, threshold=0.0),
}


@pytest.mark.parametrize("rule", RULES)
def test_it_is_lossy_and_says_so(rule: str) -> None:
    """And is greedy at temperature 0, with the deterministic drafts that greedy requests get."""
    verifier, shape = RULES[rule], widest(RULES[rule])
    assert verifier.exactness is Exactness.LOSSY
    result = enumerate_outcome(verifier, Tables.random(4, 2, seed=3), shape, IID)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9)
    if rule == "fly":  # which judges a mismatch by what follows, greedy or not
        return
    made = enumerate_drafts(Tables.random(4, 2, seed=5, kinds=("one_hot",)), shape, TOP)
    p = made.target_probs.float()
    laws = verifier.laws(made.tree, p)
    assert torch.equal(laws.stop, RejectionVerifier().laws(made.tree, p).stop)
    stop = laws.stop.argmax(1)
    assert torch.equal(laws.after(stop), p[torch.arange(len(p)), stop])


@pytest.mark.parametrize(
    ("rule", "same"),
    [
        (LenientVerifier(lenience=1.0), RejectionVerifier()),
        (NucleusVerifier(mass=0.0), RejectionVerifier()),
        (ThresholdVerifier(), TargetWalkVerifier()),
        (FuzzyVerifier(threshold=0.0), RejectionVerifier()),
        (FLyVerifier(window=1, threshold=1.0), TargetWalkVerifier()),
        (FLyVerifier(window=3, threshold=0.0), TargetWalkVerifier()),  # the draft is too short for the window
    ],
)
def test_switched_off_it_is_exact(rule: Verifier, same: Verifier) -> None:
    tables, shape = Tables.random(3, 2, seed=1, kinds=("dense", "zeros")), widest(rule)
    for law in {TOP, IID, SWOR} & rule.samplings:
        off, exact = (enumerate_outcome(each, tables, shape, law) for each in (rule, same))
        assert off.tv < EXACT
        assert off.expected_accepted == pytest.approx(exact.expected_accepted, abs=EXACT)


@pytest.mark.parametrize("kind", ["dense", "zeros", "disjoint", "equal", "one_hot"])
def test_the_error_of_nucleus_is_its_excess(kind: str) -> None:
    """Over many tables, with the nucleus by a sort; not so of the mutant that emits from p after a rejection."""
    for seed, mass in itertools.product(range(5), (0.3, 0.7, 1.0)):
        tables = Tables.random(5, 1, seed=seed, kinds=(kind,))
        assert tables.q is not None
        p, q = tables.p[0][0], tables.q[0][0]
        most, order = p.sort(descending=True, stable=True)
        nucleus = order[(most.cumsum(0) - most < mass) & (most > 0)]
        rule, excess = NucleusVerifier(mass=mass), float((q - p)[nucleus].clamp(min=0).sum())
        assert enumerate_outcome(rule, tables, TreeShape.chain(1), IID).tv == pytest.approx(excess, abs=EXACT)
        if kind == "dense" and mass < 1:
            wrong = enumerate_outcome(ChangedRule(rule, after=emit_p), tables, TreeShape.chain(1), IID)
            assert abs(wrong.tv - excess) > BIASED


def literal(match: list[float], unsure: list[bool], window: int) -> list[float]:
    """FLy's law of the last accepted position, over all patterns of matches."""
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
def test_the_law_of_fly_is_that_of_all_patterns(window: int, per_row: bool) -> None:
    generator = torch.Generator().manual_seed(window)
    rows, depth, vocab = 4, 8, 5
    p = (4 * torch.rand(rows, depth + 1, vocab, generator=generator, dtype=torch.float64) ** 2).softmax(-1)
    tokens = torch.randint(0, vocab, (rows, depth + 1), generator=generator)
    valid = torch.ones(rows, depth + 1, dtype=torch.bool)
    valid[1, 4:] = False
    shape = TreeShape.chain(depth)
    if per_row:
        tree = DraftTree.build(tokens, torch.tensor([shape.parents] * rows), valid=valid)
    else:
        tree = DraftTree.from_shape(shape, tokens, valid=valid)
    laws = FLyVerifier(window=window, threshold=0.8).laws(tree, p.where(valid[..., None], torch.nan))
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


def test_fly_at_temperature_zero_and_programs_over_large_vocabularies() -> None:
    p = torch.zeros(1, 9, 4)
    p[0, :, 2] = 1
    tree = DraftTree.from_shape(TreeShape.chain(8), torch.tensor([[0, 2, 1, 2, 2, 2, 2, 2, 2]]))
    laws = FLyVerifier().laws(tree, p)
    assert laws.stop.tolist() == [[0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert torch.equal(laws.after(torch.tensor([1])), p[:, 1])
    p = torch.full((1, 3, 200), 1 / 200)
    tree = DraftTree.from_shape(TreeShape.branching(2), torch.tensor([[0, 1, 2]]), sampling=SWOR, draft_probs=p)
    with pytest.raises(ValueError, match="200 tokens"):
        WeightedTransportVerifier(solver="program").laws(tree, p)
    assert WeightedTransportVerifier().laws(tree, p).stop.sum() == pytest.approx(1)


def test_settings_that_make_no_rule() -> None:
    for rule, name, value in (
        (LenientVerifier, "lenience", 0.0),
        (FuzzyVerifier, "divergence", "l2"),
        (FLyVerifier, "window", 0),
        (MixtureVerifier, "target_share", -0.1),
        (CascadeVerifier, "deferral", "opf"),
        (CascadeVerifier, "alpha", float("nan")),
        (WeightedTransportVerifier, "solver", "simplex"),
    ):
        with pytest.raises(ValueError, match=f"{name}="):
            rule(**{name: value})


def table(*rows: list[float], batch: int = 1) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).expand(batch, -1, -1).contiguous()


# p = (.5, .3, .2), q = (.2, .5, .3), one level, so p_1 = N([p - q]+) is all on token 0. Rejection is compared with its
# formulas in test_formulas.py, draft by draft.
REJECTION, TWO = RejectionVerifier(), RelaxedTopKVerifier(k=2)
ONE_LEVEL: list[tuple[Verifier, list[DraftSampling], list[int], list[float], list[float] | None]] = [
    # Token 1 for certain, then q without it, (.4, 0, .6), from what is left of p, (5/7, 0, 2/7):
    # token 2 is accepted with (2/7) / .6 = 10/21 of the .7, and N([p_1 - q_1]+) is all on token 0.
    (REJECTION, [TOP, SWOR], [1, 2], [0.7 * 11 / 21, 0.3, 0.7 * 10 / 21], [1.0, 0.0, 0.0]),
    # .2 / .8, then (.2 + .3) / .8
    (ThresholdVerifier(accumulated=0.8), [TOP, TOP], [2, 1], [0.375, 0.25, 0.375], None),
    (ThresholdVerifier(accumulated=0.4), [TOP] * 3, [2, 1, 0], [0.0, 0.5, 0.5, 0.0], None),  # the second exceeds 1
    (ThresholdVerifier(single=0.3), [TOP] * 3, [2, 1, 0], [0.0, 0.2, 0.8, 0.0], None),  # the second takes what is left
    (ThresholdVerifier(accumulated=0.8), [TOP, TOP], [2, 2], [0.75, 0.25, 0.0], None),  # a repetition counts once
    (TWO, [TOP, TOP], [2, 1], [0.0, 0.0, 1.0], None),
    (TWO, [TOP, TOP], [1, 0], [0.0, 0.0, 1.0], None),  # of two that pass, the more probable one
    (RelaxedTopKVerifier(k=1), [TOP, TOP], [2, 1], [1.0, 0.0, 0.0], None),
]


@pytest.mark.parametrize(("rule", "laws", "tokens", "stop", "residual"), ONE_LEVEL)
def test_one_level(rule: Verifier, laws, tokens: list[int], stop: list[float], residual: list[float] | None) -> None:
    p, q = table(*[[0.5, 0.3, 0.2]] * (len(tokens) + 1)), table(*[[0.2, 0.5, 0.3]] * (len(tokens) + 1))
    tree = DraftTree.from_shape(
        TreeShape.branching(len(tokens)),
        torch.tensor([[0, *tokens]]),
        sampling=torch.tensor([[TOP, *laws]], dtype=torch.int8),
        draft_probs=torch.full_like(q, torch.nan) if set(laws) == {TOP} else q,
    )
    found = rule.laws(tree, p)
    torch.testing.assert_close(found.stop, torch.tensor([stop], dtype=torch.float64))
    if residual is not None:
        torch.testing.assert_close(found.after(torch.tensor([0]))[0], torch.tensor(residual, dtype=torch.float64))
    assert torch.equal(found.after(torch.tensor([1])), p[:, 1]), "after a leaf p itself, to the last bit"


def test_long_paths_close_nodes_and_first_arrivals_by_hand() -> None:
    p, q = torch.rand(2, 1, 41, 50).softmax(-1)
    for token in (0, 25):
        tokens = torch.full((1, 41), token)
        law = verifiers.greedy_multipath._law_of_the_largest(p, q, tokens, torch.tensor([[3]]), 3)
        assert torch.isfinite(law).all() and (law >= 0).all()
        torch.testing.assert_close(law.sum(-1), torch.ones(1, 41, dtype=torch.float64))
    p, q = table([0.5, 0.5], [1.0, 0.0], [0.5, 0.5]), table([0.4, 0.6], [0.5, 0.5], [0.5, 0.5])
    tree = DraftTree.from_shape(TreeShape.chain(2), torch.tensor([[0, 1, 1]]), sampling=IID, draft_probs=q)
    laws = FuzzyVerifier(threshold=0.2, divergence="total_variation").laws(tree, p)
    assert laws.stop.tolist() == [[0.0, 1.0, 0.0]]
    assert laws.after(torch.tensor([1])).tolist() == [[1.0, 0.0]]
    assert torch.equal(laws.after(torch.tensor([2])), p[:, 2])
    noise = torch.tensor([1.0, 2.0, 0.5, 0.1])
    assert winners(torch.tensor([0.5, 0.3, 0.2, 0.0]), noise).tolist() == [1, 0, 0, 0]  # .5, .15, .4, never
    assert winners(torch.tensor([0.2, 0.3, 0.2, 0.3]), noise).tolist() == [0, 0, 0, 1]
    assert winners(torch.tensor([0.0, 0.4, 0.1, 0.0]), noise).tolist() == [0, 1, 0, 0], "the lower of two equal ones"
    for bad in ([0.0, 0.0, 0.0, 0.0], [torch.nan, 0.5, 0.5, 0.0]):
        assert winners(torch.tensor(bad), noise).isnan().any(), "the engine reports such rows"


FORK = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)])


@pytest.mark.parametrize(
    ("shape", "tokens", "options", "last"),
    [
        # H = .948, so delta * exp(-H) = 0.3 * 0.3875 = 0.1163 is above epsilon = 0.09, which is then the threshold.
        (TreeShape.chain(3), [0, 0, 1, 2], {}, 2),  # .6 and .3 pass, .08 does not
        (TreeShape.chain(3), [0, 2, 0, 0], {}, 0),  # what follows a rejected token is lost
        (TreeShape.chain(3), [0, 0, 1, 2], {"epsilon": 0.05}, 3),
        (TreeShape.chain(3), [0, 0, 1, 2], {"epsilon": 0.5, "delta": 0.9}, 1),  # 0.9 * exp(-H) = .353 is the smaller
        # Two paths of length two: the more probable one; the longer one wins over the more probable.
        (FORK, [0, 1, 0, 1, 0], {}, 4),
        (FORK, [0, 1, 0, 1, 2], {}, 3),
    ],
)
def test_typical_acceptance(shape: TreeShape, tokens: list[int], options: dict[str, float], last: int) -> None:
    tree = DraftTree.from_shape(shape, torch.tensor([tokens]))
    law = TypicalVerifier(**options).laws(tree, table(*[[0.6, 0.3, 0.08, 0.02]] * len(tokens))).stop
    assert law[0].tolist() == [float(node == last) for node in range(len(tokens))]
