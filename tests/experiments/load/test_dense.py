"""Dense traces: exact by enumeration, and equal to an engine round by round."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from drafters import ModelDrafter, NGramDrafter
from drafters.adaptive import AdaptiveDrafter
from experiments.load.dense import Dense
from experiments.load.dense_recording import record
from experiments.load.run import OPEN
from experiments.load.texts import Asked
from experiments.load.virtual import VirtualEngine
from experiments.load.workloads import Planned
from specdec import Drafter, Engine, SamplingParams, Target, TreeShape
from specdec.drafting.policies import AdditiveLength, FixedLength, LengthPolicy, MarginLength
from specdec.physics.costs import StepCost
from specdec.physics.rounds import AffineRounds
from tests.components import perturbed
from tests.models import tiny_model
from verifiers import RejectionVerifier

VOCAB, TOKENS, DEPTH = 3, 3, 2
COSTS = AffineRounds(target=StepCost.affine(fixed=1.0, per_token=0.01, per_position=1e-5), outside=0.1)
Tokens = tuple[int, ...]
Rounds = tuple[int, ...]
Law = dict[tuple[Tokens, Rounds], float]


def tables(seed: int) -> dict[Tokens, np.ndarray]:
    """A distribution behind every prefix."""
    rng = np.random.default_rng(seed)
    prefixes = [prefix for size in range(TOKENS + 1) for prefix in itertools.product(range(VOCAB), repeat=size)]
    return {prefix: rng.dirichlet(np.full(VOCAB, 0.7)) for prefix in prefixes}


P, Q = tables(1), tables(2)


def depth_for(tokens: Tokens, rounds: Rounds) -> int:
    """A policy that looks at all of the history: tokens, and what was accepted of drafts."""
    return (sum(tokens) + sum(rounds) + 2 * len(rounds)) % (DEPTH + 1)


def played(drop: Callable[[Tokens, int], bool] = lambda prefix, token: False) -> Law:
    """The law of tokens and accepted counts under rejection sampling; ``drop`` leaves out drafts that were drawn."""
    law: Law = defaultdict(float)

    def go(tokens: Tokens, rounds: Rounds, mass: float) -> None:
        if len(tokens) == TOKENS:
            law[tokens, rounds] += mass
            return
        depth = min(depth_for(tokens, rounds), TOKENS - len(tokens) - 1)
        step(tokens, tokens, rounds, mass, depth)

    def step(begin: Tokens, tokens: Tokens, rounds: Rounds, mass: float, left: int) -> None:
        accepted, p, q = len(tokens) - len(begin), P[tokens], Q[tokens]
        for token in range(VOCAB):
            drafts = left > 0 and not drop(tokens, token)
            if not drafts:
                share = (
                    q[token] if left > 0 else 1 / VOCAB
                )  # a draft that is left out, or none: the bonus token follows
                for bonus in range(VOCAB):
                    go((*tokens, bonus), (*rounds, accepted), mass * share * p[bonus])
                continue
            keep = min(1.0, p[token] / q[token])
            step(begin, (*tokens, token), rounds, mass * q[token] * keep, left - 1)
            residual = np.maximum(p - q, 0)
            for recovered in range(VOCAB) if keep < 1 else ():
                share = residual[recovered] / residual.sum()
                go((*tokens, recovered), (*rounds, accepted), mass * q[token] * (1 - keep) * share)

    go((), (), 1.0)
    return law


def replayed() -> Law:
    """The same law from outputs of the target and a probability for each of their tokens."""
    law: Law = defaultdict(float)
    for tokens in itertools.product(range(VOCAB), repeat=TOKENS):
        mass = np.prod([P[tokens[:at]][tokens[at]] for at in range(TOKENS)])
        rate = [min(1.0, Q[tokens[:at]][tokens[at]] / P[tokens[:at]][tokens[at]]) for at in range(TOKENS)]

        def go(at: int, rounds: Rounds, share: float, tokens: Tokens = tokens, rate: list[float] = rate) -> None:
            if at == TOKENS:
                law[tokens, rounds] += share
                return
            depth = min(depth_for(tokens[:at], rounds), TOKENS - at - 1)
            for accepted in range(depth + 1):
                kept = np.prod(rate[at : at + accepted])
                stops = 1.0 if accepted == depth else 1 - rate[at + accepted]
                go(at + accepted + 1, (*rounds, accepted), share * kept * stops)

        go(0, (), float(mass))
    return law


def distance(one: Law, other: Law) -> float:
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2


def test_an_output_and_its_probabilities_replay_rejection_sampling_exactly() -> None:
    assert sum(played().values()) == pytest.approx(1, abs=1e-12)
    assert distance(played(), replayed()) < 1e-12


def test_mutant_dropping_a_drawn_token_is_not_what_is_replayed() -> None:
    assert distance(played(drop=lambda prefix, token: Q[prefix][token] < 0.3), replayed()) > 0.01


def dense(probability: np.ndarray) -> Dense:
    count, depth = probability.shape
    return Dense(
        lengths=np.array([count]),
        probability=probability.astype(np.float32),
        proposed=np.full(count, depth, np.int32),
        nodes=np.tile(np.arange(1, depth + 1), (count, 1)),
        rank=np.zeros((count, depth), np.int32),
        margin=np.full((count, depth), np.nan, np.float32),
    )


def test_accepted_counts_follow_the_probabilities() -> None:
    rates = np.array([[0.9, 0.5, 0.7], [0.2, 0.8, 0.4]])
    drawn = dense(rates).accepted(np.random.default_rng(0), copies=4000)

    def fits(rates: np.ndarray) -> float:
        least = 1.0
        for position, own in enumerate(rates):
            reach = np.concatenate([[1.0], own.cumprod()])
            law = reach - np.append(reach[1:], 0.0)
            seen = np.bincount(drawn[:, position], minlength=4)
            least = min(least, float(stats.chisquare(seen, law * len(drawn)).pvalue))
        return least

    assert fits(rates) > 1e-3  # in one of a thousand seeds it is lower
    assert fits(rates[:, [1, 0, 2]]) < 1e-9  # the mutant: rates of other depths


# ---------------------------------------------------------------- against the engine


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=23))


def asked(temperature: float, count: int = 5) -> list[Asked]:
    rng = np.random.default_rng(7)
    made = []
    for number in range(count):
        prompt, tokens = rng.integers(0, 23, 6 + 3 * number).tolist(), 14 + 5 * number
        sampling = SamplingParams(temperature=temperature, max_new_tokens=tokens, seed=5, stream=number)
        planned = Planned(klass="any", pieces=((number, len(prompt)),), output_tokens=tokens)
        made.append(Asked(planned=planned, prompt_ids=prompt, sampling=sampling))
    return made


def drafters(target: Target) -> dict[str, tuple[Drafter, TreeShape | None]]:
    small = perturbed(target.model, 0.08)
    tree = TreeShape.branching(3, 2, 1)
    return {
        "chain": (ModelDrafter(small, 4), None),
        "tree": (ModelDrafter(small, tree, sampling="deterministic"), tree),
        "look-up": (NGramDrafter(branches=2), None),
    }


class NowAndThen(LengthPolicy):
    """Drafts in every other round of a request, so that its model has to catch up."""

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self._played = np.zeros(max_batch_size, dtype=np.int64)

    def admit(self, slot: int) -> None:
        self._played[slot] = 0

    def depths(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        self._played[slots] += 1
        return self._played[slots] % 2 * self._max_depth


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *((kind, None) for kind in ("chain", "tree", "look-up")),
        *((kind, policy) for kind in ("chain", "tree") for policy in (AdditiveLength(start=2), NowAndThen())),
    ],
)
def test_virtual_rounds_are_those_of_the_engine(kind: str, policy: LengthPolicy | None, target: Target) -> None:
    drafter, shape = drafters(target)[kind]
    requests = asked(0.0)
    traces = record(target, drafter, requests, max_batch_size=3, max_length=128)
    assert traces.facts["left_their_output"] == 0
    paced = drafter if policy is None else AdaptiveDrafter(drafter, policy)
    with Engine(target, paced, RejectionVerifier(), max_batch_size=3, max_length=128) as engine:
        done = engine.generate([each.prompt_ids for each in requests], [each.sampling for each in requests])
    virtual = VirtualEngine(costs=COSTS, slots=3, max_length=128, traces=traces, shape=shape, policy=policy)
    run = virtual.play(requests, np.zeros(len(requests)), loop=OPEN)
    table = run.requests
    for number, each in enumerate(done):
        row = table.iloc[number]
        steps = each.steps
        assert (row.rounds, row.output_tokens) == (len(steps), len(each.token_ids))
        assert (row.accepted, row.drafted, row.nodes) == (
            sum(step.accepted for step in steps),
            sum(step.proposed_depth for step in steps),
            sum(step.proposed_nodes for step in steps),
        )


def test_sampled_chains_have_the_engines_acceptance_on_average(target: Target) -> None:
    """The engine's mean over seeds is within 4 standard errors of the replayed one, and not of half the rates."""
    drafter = ModelDrafter(perturbed(target.model, 0.08), 3)
    several = [each for _ in range(8) for each in asked(1.0)]
    requests = [
        replace(each, sampling=replace(each.sampling, seed=1, stream=number)) for number, each in enumerate(several)
    ]
    traces = record(target, drafter, requests, max_batch_size=8, max_length=128)
    with Engine(target, drafter, RejectionVerifier(), max_batch_size=8, max_length=128) as engine:
        done = engine.generate([each.prompt_ids for each in requests], [each.sampling for each in requests])
    rounds = np.array([len(each.steps) for each in done])
    error = 4 * np.sqrt(2) * rounds.std() / np.sqrt(len(rounds))

    def mean_rounds(traces: Dense) -> float:
        virtual = VirtualEngine(costs=COSTS, slots=8, max_length=128, traces=traces)
        runs = [virtual.play(requests, np.zeros(len(requests)), loop=OPEN, seed=seed) for seed in range(5)]
        return float(np.mean([run.requests.rounds.mean() for run in runs]))

    assert 0 < traces.probability.mean() < 1
    assert abs(mean_rounds(traces) - rounds.mean()) < error
    halved = replace(traces, probability=traces.probability / 2)
    assert abs(mean_rounds(halved) - rounds.mean()) > error


def test_a_file_keeps_everything(tmp_path, target: Target) -> None:
    traces = record(target, ModelDrafter(perturbed(target.model, 0.1), 2), asked(0.0, 2), max_length=64, facts={"a": 1})
    again = Dense.load(traces.save(tmp_path / "dense.safetensors"))
    for name in ("lengths", "probability", "proposed", "nodes", "rank", "margin"):
        np.testing.assert_array_equal(getattr(again, name), getattr(traces, name))
    assert again.facts == dict(traces.facts) and again.has_margins
    (tmp_path / "other.safetensors").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no dense traces .* record them with experiments.load clock=record"):
        Dense.load(tmp_path / "other.safetensors")


def test_siblings_that_are_drawn_cannot_be_recorded(target: Target) -> None:
    drafter = ModelDrafter(perturbed(target.model, 0.1), [2, 2], sampling="without_replacement")
    with pytest.raises(ValueError, match=r"draws siblings at random.*record a chain"):
        record(target, drafter, asked(1.0, 1), max_length=64)
    assert record(target, drafter, asked(0.0, 1), max_length=64).depth == 2  # greedy: the likeliest tokens


def test_what_virtual_time_cannot_play_is_refused(target: Target) -> None:
    own = dense(np.ones((4, 9)))
    shallow = AffineRounds(target=COSTS.target, deepest=8)
    with pytest.raises(ValueError, match="drafts of up to 8 tokens, and drafts are 9 deep"):
        VirtualEngine(costs=shallow, slots=1, max_length=64, traces=own)
    with pytest.raises(ValueError, match=r"decides by the drafter's margins, and the traces of .* have none"):
        VirtualEngine(costs=COSTS, slots=1, max_length=64, traces=own, policy=MarginLength(COSTS))
    assert FixedLength(1).foresees is None
