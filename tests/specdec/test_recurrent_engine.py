"""Recurrent layers in targets and in drafting models: token for token and in law, over refills and preemption."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafters.eagle import EagleDrafter
from drafters.model import ModelDrafter
from specdec import Drafter, Engine, Paging, SamplingParams, Target, Topology
from specdec.cache.states import States
from specdec.checks.reference import reference_decode
from specdec.drafting import model_scorer
from specdec.drafting.builders import ExpansionTree
from specdec.drafting.model_scorer import RecurrentScorer
from specdec.memory import NoRoomError
from tests.architectures import tiny
from tests.components import DRAFTERS
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from tests.specdec.test_pages import Fitting
from tests.specdec.test_recurrent import run_again
from tests.test_distribution import LEVEL, SAMPLINGS, VOCAB, p_value
from tests.test_lossless import prompts
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")


@pytest.mark.parametrize(
    ("paging", "short"),
    [(Paging(page_size=4, pages=40, swap=2**20, reserve=0.5), False), (Paging(page_size=4), True)],
)
def test_outputs_do_not_depend_on_schedules(paging: Paging, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests lose their slots at random, and begin again; nothing is shared; also where accepted tokens run again."""
    target = Target(tiny("qwen3_next"))
    greedy, asked = SamplingParams(max_new_tokens=8), [*prompts()[:3], prompts()[0]]
    drafter = DRAFTERS["recycling"](target.model)
    alone = Engine(target, drafter, RejectionVerifier(), max_length=64).generate(asked, greedy)
    with pytest.raises(ValueError, match="qwen3_next has recurrent layers, whose states no requests share"):
        Engine(target, max_length=64, cache=Paging(shared=True))
    if short:
        run_again(monkeypatch)
    policy = Fitting(np.random.default_rng(0))
    sizes: dict[str, Any] = {"max_batch_size": 3, "max_length": 64, "prefill_chunk": 5}
    engine = Engine(target, drafter, RejectionVerifier(), cache=paging, scheduler=policy, recording="rounds", **sizes)
    assert engine.recording == "decisions"
    for _ in range(2):
        outputs = engine.generate(asked, greedy)
        assert [each.token_ids for each in outputs] == [each.token_ids for each in alone]
    states = engine.runner.cache.states
    assert (states.short is not None and bool(states.pending.inputs)) is short
    assert engine.page_counts.preempted == policy.preempted > 0 and engine.page_counts.recomputed > 0


def small() -> PreTrainedModel:
    model = tiny(
        "qwen3_next", vocab_size=VOCAB, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    model.get_output_embeddings().weight.data.mul_(2.0)
    model.get_submodule("model.layers.0.linear_attn.out_proj").weight.data.mul_(8.0)  # the state matters
    return model


def law(slots: int | None, drafter: str = "eagle_tree_without_replacement", samples: int = 2000) -> float:
    return p_value(small(), drafter, RejectionVerifier(), SAMPLINGS["temperature 1"], samples=samples, slots=slots)


def test_outputs_follow_the_target() -> None:
    """Three tokens together, as exact enumeration of the target's has them; with refilled slots."""
    assert law(500) > LEVEL
    assert law(250, "model_tree_without_replacement", 1000) > LEVEL, "drafted by another hybrid model"


keep = States.commit


def only_prompts(self: States, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Mutant of ``States.commit``: a round's states are dropped; prompts' are kept."""
    if path.shape[1]:
        self.lengths[slots] += counts
    else:
        keep(self, slots, path, counts)


def test_states_that_are_not_committed_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "commit", only_prompts)
    assert law(None, samples=1000) < LEVEL


FEW_PROMPTS = [[3], *(np.random.default_rng(2).integers(1, 24, length).tolist() for length in (2, 5, 14))]
"""Also one before whose root there is nothing."""

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


def rejected(
    target: Target, drafter: Drafter, *, spoil: Callable[[RecurrentScorer], None] | None = None, **options: Any
) -> int:
    """Return how many greedy drafts were not accepted to their end, after comparing outputs with plain decoding."""
    engine = Engine(target, drafter, RejectionVerifier(), max_length=64, prefill_chunk=4, **options)
    if spoil is not None:
        spoil(engine.session.scorer)
    outputs = engine.generate(FEW_PROMPTS, GREEDY)
    plain = engine.generate(FEW_PROMPTS, GREEDY, speculate=False)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
    steps = [step for output in outputs for step in output.steps]
    assert sum(step.proposed_depth for step in steps) > len(steps)
    return sum(step.accepted < step.proposed_depth for step in steps)


SHAPES = {"tree": (2, 2, 1), "expansion": ExpansionTree(12, 2, 3)}
"""The expansion goes on from all nodes: a deeper one leaves some out, where the most probable path may end."""


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("qwen3_next", "tree"),
        ("lfm2", "expansion"),
        *(complete(kind, "expansion", strong=False) for kind in ("mamba", "recurrent_gemma", "falcon_h1", "zaya")),
    ],
)
def test_a_model_accepts_its_own_drafts(kind: str, shape: str) -> None:
    """With fewer slots than requests, prompts in pieces, and one before whose root there is nothing."""
    target = Target(tiny(kind))
    assert not rejected(target, ModelDrafter(target.model, SHAPES[shape]), max_batch_size=3)


def test_it_follows_what_others_drafted_and_slots_that_are_lost() -> None:
    """Its rounds alternate with a look-up's, some rows draft nothing, and requests begin again; nothing is shared."""
    target = Target(tiny("qwen3_next"))
    made = DRAFTERS["choice"](target.model, 0.0)
    assert rejected(target, made, max_batch_size=3) <= 8  # of the look-up's
    paging, policy = Paging(page_size=4, pages=48, swap=2**20, reserve=0.5), Fitting(np.random.default_rng(0))
    drafter = ModelDrafter(target.model, 3)
    assert not rejected(target, drafter, max_batch_size=3, scheduler=policy, cache=paging)
    assert policy.preempted
    attention = Target(tiny_model("llama", vocab_size=64))
    rejected(attention, drafter, max_batch_size=3, cache=Paging(page_size=4, pages=48, shared=True, reserve=0.5))


def uncommitted(patch: pytest.MonkeyPatch, scorer: RecurrentScorer) -> None:
    patch.setattr(scorer.runner.cache.states, "commit", partial(only_prompts, scorer.runner.cache.states))


def rootless(patch: pytest.MonkeyPatch, scorer: RecurrentScorer) -> None:
    """Nodes start from the last token's state, as if the root were not there."""

    def below(topology: Topology) -> Topology:
        parents = torch.where(topology.parents == 0, -1, topology.parents)
        return replace(topology, parents=torch.nn.functional.pad(parents + 1, (1, 0), value=-1))

    patch.setattr(model_scorer, "_kept_below_last", below)


@pytest.mark.parametrize("mutant", [uncommitted, complete(rootless, strong=False)])
def test_states_of_other_tokens_are_noticed(mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny("qwen3_next"))
    drafter = ModelDrafter(target.model, (2, 2, 1))
    assert rejected(target, drafter, spoil=lambda scorer: mutant(monkeypatch, scorer)) > 10


def test_invariant_mode_and_drafting_models_need_a_state_for_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that run again do so in pieces, which round in another way; and trees grow from level to level."""
    target = Target(tiny("lfm2"))
    run_again(monkeypatch)
    with pytest.raises(ValueError, match=r"of which every node has one"):
        Engine(target, DRAFTERS["recycling"](target.model), RejectionVerifier(), max_length=32, invariant=True)
    with pytest.raises(NoRoomError, match="the KV caches of target and drafter need"):
        Engine(target, ModelDrafter(target.model, 3), RejectionVerifier(), max_length=32)


TEXTS = ("import os\n\n\ndef read_lines(path):\n", "class Stack:\n    def __init__(self):\n", "    for name in ")


def test_the_hybrid_writes_what_its_own_forwards_give() -> None:
    """Ragged prompts, one slot fewer than requests; and the head knows the target, or it would draft for nothing."""
    target = Target.from_pretrained("bundled/hybrid", dtype="float32", device="cpu")
    greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
    texts = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    drafter = EagleDrafter.from_pretrained("bundled/hybrid_eagle3", shape=5)
    with shapes_unchecked(), Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
        wanted = [reference_decode(target.model, text, greedy) for text in texts]
        outputs = engine.generate(texts, greedy)
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(map(len, wanted)) > 2 * sum(len(output.steps) for output in outputs)
