"""What length policies choose: by hand, against brute force, and on data whose law is known."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.stats

from specdec.drafting.costs import RaggedCosts
from specdec.drafting.policies import CostAwareLength, LengthPolicy, OracleLength, RandomLength, TableLength
from specdec.drafting.policies.lengths import best_depths
from specdec.physics.rounds import LLAMA_8B_H100

DEPTH = 8
Array = np.ndarray


def bound(policy: LengthPolicy, rows: int = 512, depth: int = DEPTH) -> LengthPolicy:
    policy.bind(max_batch_size=rows, max_depth=depth)
    for slot in range(rows):
        policy.admit(slot)
    return policy


def depths(policy: LengthPolicy, rows: int) -> list[int]:
    return policy.depths(np.arange(rows), np.full(rows, 1000)).tolist()


def test_a_table_in_vllms_syntax() -> None:
    """Both ends of an entry belong to it; gaps and what is above have the depth before; drafters are not exceeded."""
    policy = bound(TableLength([[1, 4, 9], [5, 64, 3], [100, 128, 1], [129, 200, 0]]))
    for rows, depth in ((1, 8), (4, 8), (5, 3), (64, 3), (65, 3), (99, 3), (100, 1), (128, 1), (129, 0), (512, 0)):
        assert depths(policy, rows) == [depth] * rows
    for given in ([], [[2, 4, 3]], [[1, 4, 3], [4, 8, 2]], [[1, 4]], [[1, 4, -1]], [[4, 1, 3]], [[1, 4, 2.5]]):
        with pytest.raises(ValueError, match="give ascending entries"):
            TableLength(given)


def test_random_depths_are_uniform() -> None:
    policy = bound(RandomLength(seed=5), depth=4)
    drawn = np.array([depths(policy, 8) for _ in range(2000)])
    assert scipy.stats.chisquare(np.bincount(drawn.ravel(), minlength=5)).pvalue > 1e-4 and drawn.max() == 4
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.1, "each row has its own"


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
    """Expected tokens of a round, and its seconds."""
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
            accepted, policy = rng.integers(0, most + 1, rows), bound(OracleLength(costs), rows, most)
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
        policy, rng = bound(CostAwareLength(LLAMA_8B_H100, **other), 128), np.random.default_rng(0)
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


@pytest.mark.parametrize("costs", [LLAMA_8B_H100, Priced(0.03, 0.004, padded=True)], ids=["packed", "padded"])
def test_the_oracle_is_never_beaten(costs: Any) -> None:
    rng, rows = np.random.default_rng(0), 64
    policies = {name: bound(kind(costs), rows) for name, kind in (("a", CostAwareLength), ("oracle", OracleLength))}
    slots, lengths = np.arange(rows), np.full(rows, 500)
    for _ in range(200):
        accepted = (rng.random((rows, DEPTH)) < rng.random((rows, 1))).cumprod(1).sum(1)
        reached, rates = (np.arange(DEPTH) < accepted[:, None]) * 1.0, {}
        for name, policy in policies.items():
            policy.foresee(slots, accepted)
            chosen = policy.depths(slots, lengths)
            policy.note(slots, chosen, np.minimum(chosen, accepted))
            tokens, seconds = round_of(reached, chosen, costs, rows * 500.0)
            rates[name] = tokens / seconds
        assert rates["oracle"] >= rates["a"] * (1 - 1e-12)
