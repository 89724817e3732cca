"""No length policy changes the output: the joint law of two rows' tokens over several rounds, enumerated.

Two requests decode together in rounds. What can be drawn in a round is gone through one by one, and the policy goes
with each history of what was proposed and accepted, as it would in an engine. So the laws of both outputs come out
exactly, and are compared with the target's. A draft that is cut off before a token because the token is unlikely must
change them.
"""

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import get_class
from torch import Tensor

from drafters import ModelDrafter
from drafters.combined import AdaptiveDrafter
from experiments.config.sections import TABLES
from experiments.session.policies import paced
from specdec import DraftSampling, DraftTree, Engine, SamplingParams, Target, TreeShape, Verifier
from specdec.drafting.costs import RoundCosts
from specdec.drafting.policies import LengthPolicy
from specdec.physics.costs import StepCost
from specdec.physics.rounds import AffineRounds
from tests.components import perturbed
from tests.models import tiny_model
from verifiers import BlockVerifier, RejectionVerifier, SharedNoiseVerifier, TraversalVerifier

VOCAB, LENGTH, DEPTH = 2, 3, 2

PADDED = RoundCosts(rows=(1, 2), table=((1.0, 1.3, 1.55, 1.9), (1.0, 1.6, 2.4, 3.2)))
PACKED = AffineRounds(
    target=StepCost.affine(fixed=1.0, per_token=0.25, per_position=0.01),
    drafter=StepCost.affine(fixed=0.1, per_token=0.05, per_position=0.0),
)
BY_NODES = RoundCosts(
    rows=(1, 2, 3), table=((1.0, 1.1, 1.2, 1.4), (1.0, 1.2, 1.5, 1.9), (1, 1.4, 1.9, 2.5)), nodes=(0, 1, 2, 3)
)

# Every policy by its file, with arguments that let a few rounds of two or three rows cross its thresholds.
CROSSED: dict[str, dict[str, Any]] = {
    "fixed": {"depth": 2},
    "additive": {"start": 1, "up": 1},
    "table": {"table": [[1, 1, 2], [2, 2, 1], [3, 3, 0]]},
    "cost_aware": {"costs": PADDED, "prior": 0.5, "explore": 3, "memory": 3},
    "confidence": {"threshold": 0.02},
    "looped": {"gate": -2.9, "stage": 1},
    "cost_aware_nodes": {"costs": BY_NODES, "explore": 3},
    "margin": {"costs": BY_NODES, "explore": 3},
}
FORESEEN = ("oracle",)
"""Policies that an engine refuses."""


def policy_of(name: str, **other: Any) -> Any:
    given = dict(TABLES["policy"][name])
    return get_class(given.pop("_target_"))(**given | CROSSED.get(name, {}) | other)


def test_every_policy_is_tried() -> None:
    files = set(TABLES["policy"])
    assert files == {*CROSSED, *FORESEEN, "none"}
    for name in FORESEEN:
        with pytest.raises(ValueError, match="decides by what is known after the round"):
            AdaptiveDrafter(ModelDrafter(tiny_model("llama", vocab_size=8), 2), policy_of(name))


Path = tuple[int, ...]
Both = tuple[Path, Path]
Outcomes = Sequence[tuple[int, Path, float]]
"""What a round of one row can do: how much was proposed, the emitted tokens, and the probability."""
Cut = Callable[[Path, Path], int]
"""How many of the drawn tokens are drafted, by what was emitted before and by the tokens."""


@cache
def law(seed: int, path: Path) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
    return (1.2 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)


def p(row: int, path: Path) -> Tensor:
    return law(10 + row, path)


def q(row: int, path: Path) -> Tensor:
    return law(20 + row, path)


def whole(before: Path, drawn: Path) -> int:
    return len(drawn)


def without_unlikely(before: Path, drawn: Path) -> int:
    """Drops a drawn token because it is unlikely: the mutant."""
    likely = (float(q(0, before + drawn[:i])[token]) > 0.4 for i, token in enumerate(drawn))
    return sum(itertools.takewhile(bool, likely))


@cache
def outcomes(rule: type[Verifier], row: int, before: Path, depth: int, cut: Cut) -> Outcomes:
    found: dict[tuple[int, Path], float] = defaultdict(float)
    for drawn in itertools.product(range(VOCAB), repeat=depth):
        chance = math.prod(float(q(row, before + drawn[:i])[token]) for i, token in enumerate(drawn))
        kept = drawn[: cut(before, drawn)]
        shown = kept or (0,)  # a node that is not there
        paths = [before + shown[:i] for i in range(len(shown) + 1)]
        tree = DraftTree.from_shape(
            TreeShape.chain(len(shown)),
            torch.tensor([[0, *shown]]),
            sampling=DraftSampling.IID,
            draft_probs=torch.stack([q(row, path) for path in paths])[None],
            valid=torch.arange(len(paths))[None] <= len(kept),
        )
        laws = rule().laws(tree, torch.stack([p(row, path) for path in paths])[None])
        for stop, mass in enumerate(laws.stop[0].tolist()):
            if mass > 0:
                after = laws.after(torch.tensor([stop]))[0]
                for token in range(VOCAB):
                    found[len(kept), (*kept[:stop], token)] += chance * mass * float(after[token] / after.sum())
    return tuple((proposed, emitted, mass) for (proposed, emitted), mass in found.items())


def bias(policy: LengthPolicy, rule: type[Verifier], cut: Cut = whole) -> float:
    """The total variation between the joint law of both rows' first tokens and the target's.

    Histories of what was proposed and accepted are gone through, each with the policy as it has become, and with the
    distribution of all that may have been emitted until then.
    """
    policy.bind(max_batch_size=2, max_depth=DEPTH)
    for slot in range(2):
        policy.admit(slot)
    ended: dict[Both, float] = defaultdict(float)
    depths_seen = set()

    def play(policy: LengthPolicy, reached: dict[Both, float]) -> None:
        running = [row for row in range(2) if len(next(iter(reached))[row]) < LENGTH]
        if not running:
            for both, mass in reached.items():
                ended[both] += mass
            return
        slots = np.array(running)
        lengths = np.array([len(next(iter(reached))[row]) + 5 * row for row in running])
        depths = policy.depths(slots, lengths).tolist()
        depths_seen.add(tuple(depths))
        following: dict[Any, dict[Both, float]] = defaultdict(lambda: defaultdict(float))
        for both, mass in reached.items():
            rounds = [outcomes(rule, row, both[row], depth, cut) for row, depth in zip(running, depths, strict=True)]
            for drawn in itertools.product(*rounds):
                new, history, chance = list(both), [], mass
                for row, (proposed, emitted, share) in zip(running, drawn, strict=True):
                    new[row] = (both[row] + emitted)[:LENGTH]
                    history.append((proposed, len(emitted) - 1, len(new[row])))
                    chance *= share
                following[tuple(history)][new[0], new[1]] += chance
        for history, here in following.items():
            own = copy.deepcopy(policy)
            proposed, accepted, _ = np.array(history).T
            own.note(slots, proposed, accepted)
            play(own, here)

    play(policy, {((), ()): 1.0})
    assert sum(ended.values()) == pytest.approx(1)
    assert len(depths_seen) > 1, "depths differ, if only because a row has ended"
    paths = list(itertools.product(range(VOCAB), repeat=LENGTH))
    chance = [
        [math.prod(float(p(row, path[:i])[path[i]]) for i in range(LENGTH)) for path in paths] for row in range(2)
    ]
    return sum(
        abs(ended[one, other] - chance[0][i] * chance[1][j]) / 2
        for (i, one), (j, other) in itertools.product(enumerate(paths), repeat=2)
    )


LENGTHS = [name for name in CROSSED if issubclass(type(policy_of(name)), LengthPolicy)]


@pytest.mark.parametrize("name", [*LENGTHS, "cost_aware, packed"])
def test_no_length_policy_changes_the_output(name: str) -> None:
    plain = name.partition(",")[0]
    make = partial(policy_of, plain, **({"costs": PACKED} if "packed" in name else {}))
    for rule in (RejectionVerifier, BlockVerifier, TraversalVerifier):
        assert bias(make(), rule) < 1e-12
    assert bias(make(), RejectionVerifier, cut=without_unlikely) > 0.005, "a drawn token was dropped for its q"


@pytest.mark.parametrize("name", [*LENGTHS, *FORESEEN])
def test_the_same_history_gives_the_same_depths(name: str) -> None:
    """Requests come and go. A policy that is bound again begins anew."""
    policy, other = (policy_of(name, **({"costs": PACKED} if name in FORESEEN else {})) for _ in range(2))
    runs = []
    for played in (policy, other, policy):
        rng = np.random.default_rng(0)
        played.bind(max_batch_size=64, max_depth=3)
        runs.append([])
        for number in range(60):
            slots = np.sort(rng.choice(64, 64 if number % 2 else int(rng.integers(1, 64)), replace=False))
            played.admit(int(slots[0]))
            reach = rng.integers(0, 4, len(slots))
            played.foresee(slots, reach)
            depths = played.depths(slots, 100 * slots)
            played.note(slots, depths, np.minimum(depths, reach))
            assert depths.shape == slots.shape and depths.min() >= 0 and depths.max() <= 3
            runs[-1].append(depths.tolist())
    assert runs[0] == runs[1] == runs[2]


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 1], [2] * 7, [11, 12]]
SAMPLING = [
    SamplingParams(temperature=1.2 * (i % 2), max_new_tokens=(9, 14, 6, 12, 5, 30)[i], seed=i, ignore_eos=True)
    for i in range(6)
]


@pytest.fixture(scope="module")
def plainly() -> tuple[Target, list[Path]]:
    """A target and its plain decodings, with the noise of coupled drafts."""
    target = Target(tiny_model("llama", vocab_size=24, layers=2))
    with Engine(target, ModelDrafter(target.model, 1, sampling="coupled"), SharedNoiseVerifier()) as engine:
        return target, [done.token_ids for done in engine.generate(PROMPTS, SAMPLING, speculate=False)]


@pytest.mark.parametrize("name", CROSSED)
def test_greedy_and_coupled_outputs_are_plain_decodings(plainly: tuple[Target, list[Path]], name: str) -> None:
    """Three slots and six requests, so that the load falls at the end; sampled requests share their noise."""
    target, plain = plainly
    drafter = ModelDrafter(perturbed(target.model, 0.2), 3, sampling="coupled")
    with Engine(target, paced(drafter, policy_of(name)), SharedNoiseVerifier(), max_batch_size=3) as engine:
        found = engine.generate(PROMPTS, SAMPLING)
    assert [done.token_ids for done in found] == plain
    depths = {step.proposed_depth for done in found for step in done.steps[:-3]}
    assert len(depths) > 1 or name == "fixed", "the policy chose among depths"
    assert any(step.accepted for done in found for step in done.steps)
