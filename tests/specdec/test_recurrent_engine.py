"""Engines on targets with recurrent layers: token for token and in law, over refills, preemption and chunks."""

from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec import Engine, ModelRunner, Paging, SamplingParams, Target
from specdec.cache.states import States
from specdec.checks.reference import reference_decode
from tests.architectures import tiny
from tests.components import DRAFTERS
from tests.shapes import shapes_unchecked
from tests.specdec.test_pages import Fitting
from tests.specdec.test_recurrent import run_again
from tests.test_distribution import LEVEL, SAMPLINGS, VOCAB, p_value
from tests.test_lossless import SAMPLING, prompts
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")

KINDS = ("qwen3_next", "mamba", "falcon_h1", "lfm2")


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[list[int]]]:
    """What the models' own decoding gives for the prompts of ``test_lossless``, by type; filled in when asked for."""
    return {}


def own(kind: str, model: PreTrainedModel, wanted: dict[str, list[list[int]]]) -> list[list[int]]:
    if kind not in wanted:
        with shapes_unchecked():
            pairs = enumerate(zip(prompts(), SAMPLING, strict=True))
            wanted[kind] = [reference_decode(model, prompt, each.seeded(i)) for i, (prompt, each) in pairs]
    return wanted[kind]


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        complete(kind, drafter, strong=(kind, drafter) in (("qwen3_next", "eagle3_expansion"), ("mamba", "recycling")))
        for kind in KINDS
        for drafter in ("ngram", "recycling", "medusa", "eagle3_expansion", "block_chain")
        if kind == "qwen3_next" or drafter in ("ngram", "recycling")
    ],
)
def test_speculation_equals_the_reference(kind: str, drafter: str, wanted: dict[str, list[list[int]]]) -> None:
    """More requests than slots, prompts in pieces, and greedy rows beside sampled and penalized ones."""
    model = tiny(kind)
    made = DRAFTERS[drafter](model)
    engine = Engine(Target(model), made, RejectionVerifier(), max_batch_size=3, max_length=64, prefill_chunk=7)
    outputs = engine.generate(prompts(), SAMPLING)
    expected = own(kind, model, wanted)
    for output, sampling, tokens in zip(outputs, SAMPLING, expected, strict=True):
        assert not sampling.greedy or list(output.token_ids) == tokens
    steps = [step for output in outputs for step in output.steps]
    assert any(step.accepted for step in steps) and any(step.accepted < step.proposed_depth for step in steps)
    plain = engine.generate(prompts(), SAMPLING, speculate=False)
    assert [list(output.token_ids) for output in plain] == expected


@pytest.mark.parametrize("paging", [Paging(), Paging(page_size=4, pages=40, swap=2**20, reserve=0.5)])
def test_outputs_do_not_depend_on_schedules(paging: Paging) -> None:
    """Requests lose their slots at random, and begin again; nothing is shared."""
    target = Target(tiny("qwen3_next"))
    greedy, asked = SamplingParams(max_new_tokens=8), [*prompts()[:3], prompts()[0]]
    drafter = DRAFTERS["recycling"](target.model)
    alone = Engine(target, drafter, RejectionVerifier(), max_length=64).generate(asked, greedy)
    policy = Fitting(np.random.default_rng(0))
    sizes: dict[str, Any] = {"max_batch_size": 3, "max_length": 64, "prefill_chunk": 5}
    engine = Engine(target, drafter, RejectionVerifier(), cache=paging, scheduler=policy, **sizes)
    for _ in range(2):
        outputs = engine.generate(asked, greedy)
        assert [each.token_ids for each in outputs] == [each.token_ids for each in alone]
    assert engine.page_counts.preempted == policy.preempted > 0 and engine.page_counts.recomputed > 0
    with pytest.raises(ValueError, match="qwen3_next has recurrent layers, whose states no requests share"):
        Engine(target, max_length=64, cache=Paging(shared=True))


def test_outputs_are_the_same_where_accepted_tokens_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all rows in every round, and refilled slots."""
    target, greedy = Target(tiny("qwen3_next")), SamplingParams(max_new_tokens=12)
    drafter, found = DRAFTERS["recycling"](target.model), []
    asked = [times * each for each in prompts()[:3] for times in (1, 3)]
    for slots in (1, 3):
        engine = Engine(
            target, drafter, RejectionVerifier(), max_batch_size=slots, max_length=64, cache=Paging(page_size=4)
        )
        found.append([each.token_ids for each in engine.generate(asked, greedy) + engine.generate(asked[::-1], greedy)])
        run_again(monkeypatch)
    states = engine.runner.cache.states
    assert states is not None and states.short is not None and states.pending is not None
    assert states.pending.inputs
    assert found[0] == found[1]


def small() -> PreTrainedModel:
    model = tiny(
        "qwen3_next", vocab_size=VOCAB, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    head, last = model.get_output_embeddings(), model.get_submodule("model.layers.0.linear_attn.out_proj")
    assert isinstance(head, nn.Linear) and isinstance(last, nn.Linear)
    head.weight.data.mul_(2.0)
    last.weight.data.mul_(8.0)  # the state matters
    return model


def law(slots: int | None) -> float:
    return p_value(
        small(),
        "eagle_tree_without_replacement",
        RejectionVerifier(),
        SAMPLINGS["temperature 1"],
        samples=2000,
        slots=slots,
    )


def test_outputs_follow_the_target() -> None:
    """Three tokens together, as exact enumeration of the target's has them; with refilled slots."""
    assert law(500) > LEVEL


keep = States.commit


def only_prompts(self: States, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Mutant of ``States.commit``: a round's states are dropped; prompts' are kept."""
    if path.shape[1]:
        self.lengths[slots] += counts
    else:
        keep(self, slots, path, counts)


def test_states_that_are_not_committed_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "commit", only_prompts)
    assert law(None) < LEVEL


def test_the_invariant_mode_has_states_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that run again do so in pieces, which round in another way."""
    run_again(monkeypatch)
    target = Target(tiny("lfm2"))
    with pytest.raises(ValueError, match=r"of which every node has one"):
        Engine(target, DRAFTERS["recycling"](target.model), RejectionVerifier(), max_length=32, invariant=True)


def test_a_warm_up_and_recorded_decisions_change_nothing() -> None:
    target = Target(tiny("qwen3_next"))
    drafter = DRAFTERS["recycling"](target.model)
    greedy = SamplingParams(max_new_tokens=40)
    whole = Engine(target, drafter, RejectionVerifier(), max_length=64, recording="rounds")
    whole.warm_up()
    assert whole.recording == "decisions"
    off = Engine(target, drafter, RejectionVerifier(), max_length=64, recording="off")
    first, second = (engine.generate([[1, 2, 3], [4, 5]], greedy) for engine in (whole, off))
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    counts = whole.recording_counts
    assert counts.replays > 0 and not counts.refused
    assert isinstance(whole.runner, ModelRunner) and whole.runner.cache.states is not None
