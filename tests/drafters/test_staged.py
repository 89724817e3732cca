"""Staged drafts: the chain is the model's own, whatever drafts for it, and takes fewer of its forwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters import ModelDrafter, NGramDrafter, SelfDrafter, StagedDrafter
from drafters.staged import _Stage
from specdec import Drafter, Engine, SamplingParams, Target
from tests.changed_rule import ChangedRule, emit_p
from tests.components import perturbed
from tests.drafters.agreeing import agreements
from tests.models import tiny_model
from tests.test_distribution import FEWER, LEVEL, SAMPLINGS, p_value
from tests.test_distribution import VOCAB as FEW
from verifiers import BlockVerifier, RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")
VOCAB = 16
RULE = RejectionVerifier()
LOOKUP = NGramDrafter(4, branches=1)
PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7], [9, 8], [2, 2, 3, 1, 2, 2, 3, 5, 6, 1, 4]]
DRAWN = SamplingParams(max_new_tokens=22, temperature=1.0, ignore_eos=True, seed=2)


def near(model: Any, length: int = 5, distance: float = 0.15) -> ModelDrafter:
    return ModelDrafter(perturbed(model, distance), length)


HELPERS: dict[str, Callable[[Any], Drafter]] = {
    "look-up": lambda model: LOOKUP,
    "model": lambda model: near(model, 3, 0.3),
    "three stages": lambda model: StagedDrafter(near(model, 4, 0.3), near(model, 2, 0.6), BlockVerifier()),
    "four stages": lambda model: StagedDrafter(
        SelfDrafter(["1.mlp"], 5, temperature=0.8), StagedDrafter(near(model, 3, 0.6), LOOKUP, RULE), BlockVerifier()
    ),
}


def agreeing(model: Any, helper: Drafter) -> list[tuple[int, bool]]:
    """Whether q is what the drafting model says behind the tokens of the row, by plain forwards."""
    staged, drafting = StagedDrafter(near(model), helper, RULE), near(model).model
    sizes = {"max_batch_size": 3, "max_length": 40, "prefill_chunk": 3}
    return agreements(
        Target(model), staged, lambda known, path: drafting(torch.tensor([known + path[1:]])).logits[0, -1].softmax(-1),
        prompts=PROMPTS, sampling=DRAWN, **sizes, check=True,
    )[0]  # fmt: skip


@pytest.mark.parametrize("helper", HELPERS)
def test_q_is_the_models_own_law(model: Any, helper: str) -> None:
    found = agreeing(model, HELPERS[helper](model))
    assert all(same for _, same in found) and sum(depth == 4 for depth, _ in found) > 10


def test_a_cache_that_lacks_a_token_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the last committed token is taken to be in every cache."""
    begin = _Stage.begin

    def too_sure(self: _Stage, batch: Any) -> None:
        begin(self, batch)
        self.known = batch.on_host.lengths

    monkeypatch.setattr(_Stage, "begin", too_sure)
    assert not all(same for _, same in agreeing(model, LOOKUP))


def test_the_model_runs_less_often_than_it_drafts(model: Any) -> None:
    """A helper like the model itself: all that it drafts is accepted, so two forwards draw five tokens."""
    runs = []
    for drafter in (near(model), StagedDrafter(near(model), near(model, 3), RULE)):
        engine = Engine(Target(model), drafter, RULE, max_length=40, optimize=False)  # nothing is replayed
        session: Any = engine.session
        runner, ran = session.models[0], []
        runner.run = lambda batch, ran=ran, run=runner.run: ran.append(batch.wants.logits != 0) or run(batch)
        (done,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30, ignore_eos=True))
        runs.append([sum(ran), *(step.proposed_depth for step in done.steps)])
    (alone, *depths), (staged, *same) = runs
    assert depths == same and alone == sum(depths)
    assert staged == sum(-(-depth // 4) for depth in depths)


def test_a_rule_that_is_not_exact_one_stage_down_biases_the_output() -> None:
    """Mutant: the model's chain takes the next token from p after a rejection, so that it does not follow q."""
    model, biased = tiny_model(vocab_size=FEW, scale=1.5, layers=2), ChangedRule(RULE, after=emit_p)
    made = StagedDrafter(near(model, 3, 0.3), near(model, 2, 1.5), biased)
    assert p_value(model, made, RULE, SAMPLINGS["temperature 1"], samples=FEWER) < LEVEL
    honest = StagedDrafter(near(model, 3, 0.3), near(model, 2, 1.5), RULE)
    assert p_value(model, honest, RULE, SAMPLINGS["top-k and top-p"]) > LEVEL
