"""Drafting models with recurrent layers: their states follow what is accepted, whoever drafted it, and losslessly.

A model that drafts for itself is the measure: whatever it proposes for a greedy request is accepted, unless its states
are of other tokens than the request's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from drafters.model import ModelDrafter
from specdec import Drafter, Engine, Paging, SamplingParams, Target, Topology
from specdec.checks.drafter import assert_conforms
from specdec.drafting import model_scorer
from specdec.drafting.builders import ExpansionTree
from specdec.drafting.model_scorer import RecurrentScorer
from specdec.drafting.scored import ScoredSession
from specdec.memory import NoRoomError
from tests.architectures import VOCAB, tiny
from tests.components import DRAFTERS
from tests.models import tiny_model
from tests.specdec.test_pages import Fitting
from tests.specdec.test_recurrent import run_again
from tests.specdec.test_recurrent_engine import only_prompts, small
from tests.test_distribution import LEVEL, SAMPLINGS, p_value
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")

PROMPTS = [[3], *(np.random.default_rng(2).integers(1, 24, length).tolist() for length in (2, 5, 14))]
"""Also one before whose root there is nothing."""

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


Mutant = Callable[[pytest.MonkeyPatch, RecurrentScorer], None]


def rejected(
    target: Target, drafter: Drafter, *, spoil: Callable[[RecurrentScorer], None] | None = None, **options: Any
) -> int:
    """Return how many greedy drafts were not accepted to their end, after comparing outputs with plain decoding."""
    engine = Engine(target, drafter, RejectionVerifier(), max_length=64, prefill_chunk=4, **options)
    if spoil is not None:
        assert isinstance(engine.session, ScoredSession) and isinstance(engine.session.scorer, RecurrentScorer)
        spoil(engine.session.scorer)
    outputs = engine.generate(PROMPTS, GREEDY)
    plain = engine.generate(PROMPTS, GREEDY, speculate=False)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
    steps = [step for output in outputs for step in output.steps]
    assert sum(step.proposed_depth for step in steps) > len(steps)
    return sum(step.accepted < step.proposed_depth for step in steps)


SHAPES = {"chain": 4, "tree": (2, 2, 1), "expansion": ExpansionTree(12, 2, 3)}
"""The expansion goes on from all nodes: a deeper one leaves some out, where the most probable path may end."""


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        complete(kind, shape, strong=(kind, shape) in (("qwen3_next", "tree"), ("lfm2", "expansion")))
        for kind in ("qwen3_next", "mamba", "lfm2", "recurrent_gemma", "falcon_h1", "zaya")
        for shape in SHAPES
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
    attention = Target(tiny_model("llama", vocab_size=VOCAB))
    rejected(attention, drafter, max_batch_size=3, cache=Paging(page_size=4, pages=48, shared=True, reserve=0.5))


def uncommitted(patch: pytest.MonkeyPatch, scorer: RecurrentScorer) -> None:
    states = scorer.runner.cache.states
    assert states is not None
    patch.setattr(states, "commit", partial(only_prompts, states))


def rootless(patch: pytest.MonkeyPatch, scorer: RecurrentScorer) -> None:
    """Nodes start from the last token's state, as if the root were not there."""

    def below(topology: Topology) -> Topology:
        parents = torch.where(topology.parents == 0, -1, topology.parents)
        return replace(topology, parents=torch.nn.functional.pad(parents + 1, (1, 0), value=-1))

    patch.setattr(model_scorer, "_kept_below_last", below)


@pytest.mark.parametrize("mutant", [uncommitted, complete(rootless, strong=False)])
def test_states_of_other_tokens_are_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny("qwen3_next"))
    drafter = ModelDrafter(target.model, (2, 2, 1))
    assert rejected(target, drafter, spoil=lambda scorer: mutant(monkeypatch, scorer)) > 10


def test_it_needs_a_state_for_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because its trees grow from level to level."""
    target = Target(tiny("lfm2"))
    run_again(monkeypatch)
    with pytest.raises(NoRoomError, match="the KV caches of target and drafter need"):
        Engine(target, ModelDrafter(target.model, 3), RejectionVerifier(), max_length=32)


def test_outputs_follow_the_target() -> None:
    """Three tokens together, drafted by another hybrid model, siblings drawn without replacement; with refills."""
    kind = "model_tree_without_replacement"
    assert p_value(small(), kind, RejectionVerifier(), SAMPLINGS["temperature 1"], samples=1000, slots=250) > LEVEL


def test_a_hybrid_drafts_for_attention_and_keeps_the_contract() -> None:
    """Outputs, laws, slots, beginnings, recorded rounds: all that ``check_drafter`` asks."""
    target = Target(tiny_model("llama", vocab_size=VOCAB))
    few: Any = {"tokens": 6, "rounds": 8, "draws": 120, "max_length": 64, "verifier": RejectionVerifier()}
    assert_conforms(lambda: ModelDrafter(tiny("lfm2"), (2, 1)), target, prompts=PROMPTS[1:], **few)
