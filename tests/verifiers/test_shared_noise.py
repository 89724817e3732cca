"""Shared noise: the output is plain decoding's whatever was drafted; coupled drafts are the first in the race."""

import pytest
import torch
from torch import Tensor

from drafters.model import ModelDrafter
from specdec import DraftSampling, DraftTree, Engine, Noise, SamplingParams, Target
from specdec.checks.outcomes import check_shared
from specdec.checks.tables import Tables
from specdec.coupling import winners
from specdec.random import request_key, shared_noise
from tests.changed_rule import ChangedRule, accept_the_first
from tests.components import perturbed
from tests.forwards import inner_paths
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.verifiers.cases import IID, KINDS, SHAPES, SWOR, TOP
from verifiers import SharedNoiseVerifier

COUPLED = DraftSampling.COUPLED
LEVEL = 1e-5
SAMPLES = 5000


@pytest.mark.parametrize("law", [COUPLED, TOP, IID, SWOR], ids=lambda law: law.name)
def test_every_output_is_plain_decodings(law: DraftSampling) -> None:
    for kinds in ("dense", "every kind"):
        tables = Tables.random(4, 2, seed=2, kinds=KINDS[kinds])
        result = check_shared(SharedNoiseVerifier(), tables, SHAPES["2x2"], law, samples=SAMPLES, seed=1)
        assert result.differing == 0
        assert result.p_value > LEVEL
        assert result.accepted > 0


@pytest.mark.parametrize("mistake", [{"after": lambda tree, p, laws, stop: p[:, 0]}, {"stop": accept_the_first}])
def test_a_wrong_rule_differs(mistake: dict) -> None:
    tables = Tables.random(4, 2, seed=2)
    rule = ChangedRule(SharedNoiseVerifier(), **mistake)
    assert check_shared(rule, tables, SHAPES["2x2"], COUPLED, samples=SAMPLES).differing > SAMPLES // 20


def test_a_law_that_is_not_the_targets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: numbers that are a little too large for improbable tokens."""
    monkeypatch.setattr("specdec.checks.outcomes.winners", lambda probs, noise: winners(probs**1.1, noise))
    result = check_shared(SharedNoiseVerifier(), Tables.random(4, 2, seed=2), SHAPES["2x2"], COUPLED, samples=20_000)
    assert result.p_value < LEVEL


PROMPTS = [[1, 2, 3, 1, 2], [7], [5, 6, 5, 6, 5, 6, 5, 6, 5]]
SAMPLING = (
    SamplingParams(max_new_tokens=10, temperature=1.0),
    SamplingParams(max_new_tokens=12, temperature=0.8, top_k=12, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(max_new_tokens=13),
)


def test_noise_of_the_round_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: keyed by the position of the round's root alone, as fresh noise is keyed by the round."""
    model, pairs = tiny_model("llama", vocab_size=24, layers=2), enumerate(zip(PROMPTS, SAMPLING, strict=True))
    expected = [reference_decode(model, prompt, s.seeded(i), noise=Noise.SHARED) for i, (prompt, s) in pairs]

    def by_root(target_probs: Tensor, tree: DraftTree, keys: Tensor, lengths: Tensor) -> Tensor:
        return winners(target_probs, shared_noise(keys, lengths[:, None] + 1, target_probs.shape[2]))

    monkeypatch.setattr("specdec.engine.round.decided", by_root)
    drafter = ModelDrafter(perturbed(model, 0.3), 3, sampling="coupled")
    engine = Engine(Target(model), drafter, SharedNoiseVerifier(), max_batch_size=3, max_length=40)
    assert [list(output.token_ids) for output in engine.generate(PROMPTS, SAMPLING)] != expected
    assert [list(output.token_ids) for output in engine.generate(PROMPTS, SAMPLING, speculate=False)] == expected


def test_coupled_children_are_the_first_in_the_race_and_greedy_rows_get_the_top_k() -> None:
    model, seen = tiny_model("llama", vocab_size=24, layers=2), []
    twin, shape = perturbed(model, 0.3), [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    drafter = ModelDrafter(twin, shape, sampling="coupled")
    wanted = [SamplingParams(max_new_tokens=12), SamplingParams(temperature=0.9, seed=3, max_new_tokens=12)]
    with Engine(Target(model), drafter, SharedNoiseVerifier(), max_batch_size=2, max_length=64) as engine:
        engine.on_round = lambda each: seen.append((each.tree, [list(row.tokens) for row in each.requests if row]))
        engine.generate([[1, 2, 3, 1, 2], [5, 6, 5]], wanted)
    whole = [each for each in seen if each[0].valid.all() and len(each[1]) == 2]
    assert len(whole) > 2
    for tree, sequences in whole:
        assert tree.draft_probs is None
        assert tree.law[:, 1:].tolist() == [[TOP] * 5, [COUPLED] * 5]
        for row, known in enumerate(sequences):
            for node, (_, *above) in inner_paths(tree, row).items():
                children = tree.tokens[row, tree.parents[row] == node]
                scores = twin(torch.tensor([[*known, *above]])).logits[0, -1] / 0.9
                position = torch.tensor([[len(known) + len(above)]])
                noise = shared_noise(torch.tensor([request_key(3, 1)]), position, 24)[0, 0]
                race = scores.log_softmax(-1) - noise.log() if row else scores
                assert children.tolist() == race.topk(len(children)).indices.tolist()
