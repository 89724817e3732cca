"""Choices of policies of length and of nodes: by hand, against brute force, and on data with a known law."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafters import ModelDrafter, NGramDrafter
from drafters.combined import AdaptiveDrafter
from experiments.measuring import rounds
from experiments.measuring.rounds import measure_costs, node_sizes
from specdec import DraftTree, Engine, SamplingParams, Target
from specdec.drafting import policies
from specdec.drafting.builders import AnyTree, ExpansionTree, ReplayedTree, SampledTree, StaticTree, TreeBuilder
from specdec.drafting.calibration import BINS, Calibration
from specdec.drafting.costs import RaggedCosts, RoundCosts
from specdec.drafting.policies.lengths import best_depths
from specdec.physics.rounds import LLAMA_8B_H100
from tests.components import perturbed
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

VOCAB, SCALE, DEPTH = 24, 2.0, 8
SLOTS, LENGTHS = np.array([0, 1]), np.array([100, 100])
Array = np.ndarray


def bound(policy: policies.LengthPolicy, rows: int = 512, depth: int = DEPTH) -> policies.LengthPolicy:
    policy.bind(max_batch_size=rows, max_depth=depth)
    for slot in range(rows):
        policy.admit(slot)
    return policy


def depths(policy: policies.LengthPolicy, rows: int) -> list[int]:
    return policy.depths(np.arange(rows), np.full(rows, 1000)).tolist()


def test_additive_length() -> None:
    policy = bound(policies.AdditiveLength(start=3), depth=6)
    assert policy.depths(SLOTS, LENGTHS).tolist() == [3, 3]
    policy.note(SLOTS, np.array([3, 3]), np.array([3, 1]))
    assert policy.depths(SLOTS, LENGTHS).tolist() == [5, 2]
    policy.note(SLOTS, np.array([5, 0]), np.array([5, 0]))
    assert policy.depths(SLOTS, LENGTHS).tolist() == [6, 2], "as deep as can be; nothing drafted, nothing learned"
    for _ in range(5):
        policy.note(SLOTS, np.array([1, 1]), np.array([0, 0]))
    assert policy.depths(SLOTS, LENGTHS).tolist() == [1, 1]
    policy.admit(1)
    assert policy.depths(SLOTS, LENGTHS).tolist() == [1, 3]


def test_a_table_in_vllms_syntax() -> None:
    """Both ends of an entry belong to it; gaps and what is above have the depth before; drafters are not exceeded."""
    policy = bound(policies.TableLength([[1, 4, 9], [5, 64, 3], [100, 128, 1], [129, 200, 0]]))
    for rows, depth in ((1, 8), (4, 8), (5, 3), (64, 3), (65, 3), (99, 3), (100, 1), (128, 1), (129, 0), (512, 0)):
        assert depths(policy, rows) == [depth] * rows
    for given in ([], [[2, 4, 3]], [[1, 4, 3], [4, 8, 2]], [[1, 4, 2.5]]):
        with pytest.raises(ValueError, match="give ascending entries"):
            policies.TableLength(given)


@dataclass(frozen=True)
class Priced:
    """Costs of levels and of tokens."""

    level: float
    token: float
    padded: bool = False

    def check_depth(self, depth: int) -> None: ...
    def ragged(self, rows: int, positions: float, *, drafted: Any, deepest: Any) -> Any:
        tokens = rows * deepest if self.padded else drafted
        return 1.0 + self.level * np.sqrt(deepest) + self.token * tokens + 1e-4 * positions


def round_of(survival: Array, chosen: Array, costs: RaggedCosts, positions: float) -> Array:
    emitted = len(chosen) + survival[np.arange(survival.shape[1]) < chosen[:, None]].sum()
    drafted, deepest = np.array([chosen.sum()]), np.array([chosen.max()])
    return np.array([emitted, *costs.ragged(len(chosen), positions, drafted=drafted, deepest=deepest)])


def rate(survival: Array, chosen: Array, costs: RaggedCosts, positions: float) -> float:
    return float(np.divide(*round_of(survival, chosen, costs, positions)))


@pytest.mark.parametrize("knows", ["probabilities", "everything"])
def test_best_depths_are_the_best_of_all(knows: str) -> None:
    """Against every vector of depths; of the oracle by what is accepted."""
    rng, deep = np.random.default_rng(0), set()
    for case in range(100):
        rows, most = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        costs = Priced(rng.choice([0.0, 0.3]) * rng.random(), rng.random() * 0.6, padded=case % 2 == 0)
        survival = rng.random((rows, most)).cumprod(1).round(1 if case % 3 else 9)  # with ties, too
        if knows == "everything":
            accepted, policy = rng.integers(0, most + 1, rows), bound(policies.OracleLength(costs), rows, most)
            policy.foresee(np.arange(rows), accepted)
            survival, chosen = (np.arange(most) < accepted[:, None]) * 1.0, np.array(depths(policy, rows))
            assert (chosen <= accepted).all()
        else:
            chosen = best_depths(survival, costs, 1000.0 * rows)
        every = itertools.product(range(most + 1), repeat=rows)
        best = max(rate(survival, np.array(each), costs, 1000.0 * rows) for each in every)
        assert rate(survival, chosen, costs, 1000.0 * rows) == pytest.approx(best)
        deep |= set(chosen.tolist())
    assert deep == {0, 1, 2, 3}


def test_goodput_finds_the_depths_that_pay_and_explores_within_its_budget() -> None:
    """Half of the rows accept much and half little; it is within 3 % of knowing that, the first rounds included."""
    alpha, slots = np.repeat([0.85, 0.3], 64), np.arange(128)
    survival = alpha[:, None] ** np.arange(1, DEPTH + 1)

    def run(rounds: int, context: int = 1000, **other: Any) -> tuple[Array, float]:
        """Depths by round and row, and expected tokens per second."""
        policy, rng = bound(policies.CostAwareLength(LLAMA_8B_H100, **other), 128), np.random.default_rng(0)
        chosen, played = [], []
        for _ in range(rounds):
            now = policy.depths(slots, np.full(128, context))
            wrong = rng.random((128, DEPTH)) >= alpha[:, None]
            policy.note(slots, now, np.minimum(np.where(wrong.any(1), wrong.argmax(1), DEPTH), now))
            played.append(round_of(survival, now, LLAMA_8B_H100, 128.0 * context))
            chosen.append(now)
        tokens, seconds = np.sum(played, axis=0)
        return np.array(chosen), float(tokens / seconds)

    chosen, found = run(1500)
    known = rate(survival, best_depths(survival, LLAMA_8B_H100, 128_000.0), LLAMA_8B_H100, 128_000.0)
    assert found > 0.97 * known
    assert chosen[500:, :64].mean() > chosen[500:, 64:].mean() + 2, "every request has the depth that pays for it"
    assert found > (1 - 2 * 0.005 - 0.002) * run(1500, explore=0)[1], "half a percent for either kind of exploring"
    assert run(300, 8000)[0][100:].mean() > run(300, 200)[0][100:].mean() + 1, "long contexts pay for deeper drafts"


def test_drafts_are_no_deeper_than_the_policy_says_and_it_hears_what_was_accepted(target: Target) -> None:
    policy, heard = policies.FixedLength(2), list[tuple[int, int]]()
    policy.note = lambda slots, *told: heard.extend(zip(*(each.tolist() for each in told), strict=True))
    drafter = AdaptiveDrafter(NGramDrafter(max_draft_tokens=4, max_ngram=2), policy)
    with Engine(target, drafter, RejectionVerifier()) as engine:
        (done,) = engine.generate([[1, 2, 3, 1, 2]], SamplingParams(max_new_tokens=30))
    told = [(step.proposed_depth, step.accepted) for step in done.steps]
    assert heard == told[: len(heard)]
    assert len(heard) >= len(told) - 1, "the last round may end the request before it is told"
    assert {0, 2} <= {depth for depth, _ in told} <= {0, 1, 2}, "an n-gram that is not found drafts nothing"


def test_costs_are_measured_kept_and_read_again(target: Target, tmp_path: Path) -> None:
    drafter, path = ModelDrafter(target.model, 2), tmp_path / "costs.json"
    found = measure_costs(target, drafter, RejectionVerifier(), [[1, 2, 3]], rows=(2, 1), rounds=2)
    assert found.rows == (1, 2) and found.max_depth == 2
    assert (found.device, found.dtype, found.drafter) == ("cpu", "float32", "ModelDrafter")
    tree = ModelDrafter(target.model, ExpansionTree(3, 2, 2)).pruned_by(policies.ConfidenceNodes())
    by_nodes = measure_costs(target, tree, RejectionVerifier(), [[1, 2, 3]], rows=(1,), rounds=2, by_nodes=True)
    assert by_nodes.nodes == (0, 1, 2, 3) and node_sizes(20) == (0, 1, 2, 3, 4, 6, 8, 12, 16, 20)
    for costs in (found, by_nodes):
        costs.save(path)
        assert RoundCosts.load(path) == costs
    for content in ("", '{"rows": [2, 1], "table": [[1.0], [1.0]]}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"costs\.json holds no costs of rounds"):
            RoundCosts.load(path)


@pytest.mark.parametrize(("seconds", "timed"), [(60.0, 5), (0.0, rounds.LEAST)])
def test_few_rounds_are_timed_where_they_take_long(
    target: Target, seconds: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(rounds, "SECONDS", seconds)
    monkeypatch.setattr(rounds, "smallest", lambda times: counts.append(len(times)) or min(times))
    drafter = ModelDrafter(target.model, 2)
    measure_costs(target, drafter, RejectionVerifier(), [[1, 2, 3]], rounds=5, max_length=120)
    assert counts == [timed] * 3


def trees_of(target: Target, shape: TreeBuilder, policy: policies.NodePolicy, *, tokens: int = 16) -> list[DraftTree]:
    law = "without_replacement" if isinstance(shape, SampledTree) else "deterministic"
    drafter = ModelDrafter(perturbed(target.model, 0.05), shape, sampling=law).pruned_by(policy)
    trees: list[DraftTree] = []
    with Engine(target, drafter, RejectionVerifier(), max_batch_size=2, check=True) as engine:
        engine.on_round = lambda played: trees.append(played.tree)
        engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    return trees


def test_rates_by_hand() -> None:
    """One node of the cell was accepted of two that were tried; both estimates that it leans on count for eight."""
    calibration = Calibration(depths=2, ranks=2)
    cell = calibration.cells(torch.tensor([[0.5]]), torch.tensor([[0]]), torch.tensor([[2]]), torch.tensor([[0]]))
    assert cell.tolist() == [[2 * BINS + 8]], "depth 2, and a logit of 0 is the first half above the middle"
    for accepted in (True, False):
        yes = torch.tensor([[True]])
        calibration.count(cell, torch.tensor([[0.7]]), yes, torch.tensor([[accepted]]), learn=True)
    raw = float(torch.sigmoid(torch.tensor(0.25)))
    pooled = (1 + 8 * raw) / (2 + 8)
    rates = calibration.rates().view(2, 2, 2, BINS)
    assert float(rates[0, 1, 0, 8]) == pytest.approx((1 + 8 * pooled) / (2 + 8))
    assert float(rates[0, 0, 0, 8]) == pytest.approx(pooled), "nothing was tried at depth 1"
    assert float(rates[1, 1, 0, 8]) == pytest.approx(raw), "nor of sampled requests"
    assert float(rates[1, 1, 1, 8]) == pytest.approx(raw * (1 - raw)), "the next sibling gets what the others leave"
    (found,) = calibration.errors()
    assert (found["requests"], found["depth"], found["nodes"]) == ("greedy", 2, 2)
    assert [found[name] for name in ("predicted", "accepted", "calibration_error")] == pytest.approx([0.7, 0.5, 0.2])


def test_a_calibration_is_kept_and_read_again(tmp_path: Path) -> None:
    calibration, path = Calibration(depths=3, ranks=2), tmp_path / "c.json"
    calibration.tried, calibration.right = calibration.tried + 2, calibration.right + 1
    calibration.save(path, source="top")
    shallower = Calibration(depths=2, ranks=1)
    shallower.load(path, source="top")
    assert torch.equal(shallower.right, torch.ones(2, 2, 1, BINS, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"source=top .* source=head"):
        shallower.load(path, source="head")
    with pytest.raises(ValueError, match=r"depth 3 and 2 siblings, .* depth 4"):
        Calibration(depths=4, ranks=2).load(path, source="top")
    path.write_text('{"tried": [1]}')
    with pytest.raises(ValueError, match="holds no calibration"):
        shallower.load(path, source="top")


@pytest.mark.parametrize("shape", [StaticTree([2, 2, 1]), SampledTree(9, 4, 3)])
def test_what_is_verified_stands_first(target: Target, shape: TreeBuilder) -> None:
    trees = trees_of(target, shape, policies.FirstNodes(3))
    for tree in trees:
        assert tree.width <= 4 and tree.valid[:, 1:].sum(-1).max() <= min(3, tree.width - 1)
        assert (tree.valid.long().diff(dim=1) <= 0).all()
    assert max(tree.width for tree in trees) == 4


@pytest.mark.parametrize("shape", [complete(StaticTree(5), strong=False), StaticTree([2, 2, 1])])
def test_a_draft_that_ends_early_is_the_same_draft(target: Target, shape: TreeBuilder, monkeypatch) -> None:
    """Whether the host stops the drafting or lets all nodes be drafted, the same ones are verified."""
    stopped = trees_of(target, shape, policies.ConfidenceNodes(0.015, learn=False))
    monkeypatch.setattr(policies.ConfidenceNodes, "_least", lambda self: None)
    whole = trees_of(target, shape, policies.ConfidenceNodes(0.015, learn=False))
    assert len({tree.width for tree in whole}) > 1, "drafts are of different sizes"
    for one, other in zip(stopped, whole, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.valid, other.valid)


def test_every_so_many_rounds_nothing_is_left_out(target: Target) -> None:
    trees = trees_of(target, StaticTree(3), policies.ConfidenceNodes(1.0, explore=4), tokens=24)
    assert [tree.width for tree in trees[:8]] == [1, 1, 1, 4, 1, 1, 1, 4]


def test_costs_of_nodes_are_convex_and_nowhere_above_the_measured_ones() -> None:
    costs = RoundCosts(rows=(1, 3), table=((1.0, 1.9, 2.0), (2.0, 2.0, 4.0)), nodes=(0, 2, 4))
    assert costs.by_nodes(1, 4).tolist() == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert costs.by_nodes(3, 3).tolist() == [2.0, 2.0, 2.0, 3.0]
    assert costs.by_nodes(2, 2).tolist() == pytest.approx([1.5, 1.725, 1.95])


def served(target: Target, costs: RoundCosts | None, shape: AnyTree = 3) -> Engine:
    drafter = ModelDrafter(target.model, shape).pruned_by(policies.CostAwareNodes(costs))
    return Engine(target, drafter, RejectionVerifier())


def test_what_does_not_fit(target: Target) -> None:
    cases = [
        (lambda: policies.ConfidenceNodes(1.5), r"from 0 \(all nodes\) to 1"),
        (lambda: trees_of(target, StaticTree([2, 1]), policies.LoopedNodes()), "stages of a chain"),
        (lambda: policies.ConfidenceNodes(source="best"), "auto, head, top, entropy, margin"),
        (lambda: ModelDrafter(target.model, SampledTree(4, 2, 2), sampling="iid"), "sampling=iid"),
        (lambda: served(target, None, ReplayedTree(4, 2, 3)), "ReplayedTree scores a level twice"),
        (lambda: served(target, None), "how long rounds take"),
    ]
    for make, named in cases:
        with pytest.raises(ValueError, match=named):
            make()
