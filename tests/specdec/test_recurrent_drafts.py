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
from torch import Tensor

from drafters.model import ModelDrafter
from specdec import Drafter, Engine, Paging, SamplingParams, Target, Topology
from specdec.checks.drafter import assert_conforms
from specdec.drafting import model_scorer
from specdec.drafting.builders import ExpansionTree
from specdec.drafting.model_scorer import RecurrentScorer
from specdec.drafting.scored import ScoredSession
from specdec.interfaces import Round
from specdec.memory import NoRoomError
from tests.architectures import VOCAB, tiny
from tests.components import DRAFTERS
from tests.models import tiny_model
from tests.specdec.test_kept_states import WRONG_STATES, mistake_states
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
    """Its rounds alternate with a look-up's, some rows draft nothing, and requests begin again; pages are shared."""
    target = Target(tiny("qwen3_next"))
    made = DRAFTERS["choice"](target.model, 0.0)
    assert rejected(target, made, max_batch_size=3) <= 8  # of the look-up's
    paging = Paging(page_size=4, pages=48, shared=True, swap=2**20, reserve=0.5)
    policy = Fitting(np.random.default_rng(0))
    drafter = ModelDrafter(target.model, 3)
    assert not rejected(target, drafter, max_batch_size=3, scheduler=policy, cache=paging)
    assert policy.preempted


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


LAYOUTS = {"rows": Paging(shared=True), "pages": Paging(page_size=4, shared=True)}
FAMILY = [[*PROMPTS[3], *PROMPTS[2] * 2, own, 7, own] for own in (3, 4, 5)]
"""Prompts that begin alike: where they part is known when the second one comes."""
NEAR = 1e-5
"""Probabilities differ by less if states do by their rounding."""


def conversations(target: str, drafter: str, **options: Any) -> tuple[list[object], Tensor, float]:
    """Prompts, and then what follows their answers.

    Returns:
        The outputs, q at the roots of all drafts, and the share of hits.
    """
    whole = Target(tiny_model("llama", vocab_size=VOCAB) if target == "llama" else tiny(target))
    made = ModelDrafter(tiny(drafter), (2, 1), sampling="iid")
    engine = Engine(whole, made, RejectionVerifier(), max_length=96, prefill_chunk=5, max_batch_size=3, **options)
    laws: dict[int, list[Tensor]] = {}

    def look(shown: Round) -> None:
        if shown.tree.draft_probs is not None:
            for request, q in zip(shown.requests, shown.tree.draft_probs, strict=True):
                laws.setdefault(request.id, []).append(q[0].clone())

    engine.on_round = look
    sampled = replace(GREEDY, temperature=1.0, seed=0)
    outputs = [each.token_ids for prompt in FAMILY for each in engine.generate([prompt], sampled)]
    turns = [[*prompt, *answer, 5, 6] for prompt, answer in zip(FAMILY, outputs, strict=True)]
    outputs += [each.token_ids for each in engine.generate(turns, sampled)]
    return outputs, torch.cat([torch.stack(each) for each in laws.values()]), engine.page_counts.hit_rate or 0.0


@pytest.mark.parametrize(
    ("target", "drafter", "layout"),
    [
        complete(target, drafter, layout, strong=(target, drafter, layout) == ("llama", "lfm2", "pages"))
        for target, drafter in (("llama", "lfm2"), ("llama", "qwen3_next"), ("mamba", "falcon_h1"), ("zaya", "zaya"))
        for layout in LAYOUTS
    ],
)
def test_beginnings_are_shared(target: str, drafter: str, layout: str) -> None:
    """Outputs and drafts are those of an engine that shares nothing."""
    outputs, wanted, _ = conversations(target, drafter)
    found, laws, hits = conversations(target, drafter, cache=LAYOUTS[layout])
    assert found == outputs
    assert (laws - wanted).abs().max() < NEAR
    assert hits > 0.4


@pytest.mark.parametrize("mutant", WRONG_STATES)
def test_states_of_another_boundary_are_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, wanted, _ = conversations("llama", "lfm2")
    mistake_states(mutant, monkeypatch)
    _, laws, _ = conversations("llama", "lfm2", cache=LAYOUTS["pages"])
    assert laws.shape != wanted.shape or (laws - wanted).abs().max() > 10 * NEAR


def test_requests_that_do_not_speculate_need_no_states_of_the_drafter() -> None:
    target = Target(tiny_model("llama", vocab_size=VOCAB))
    engine = Engine(target, ModelDrafter(tiny("lfm2"), 2), RejectionVerifier(), max_length=64, cache=LAYOUTS["pages"])
    found = []
    for speculate in (False, False, True, True):
        before = engine.page_counts.reused
        engine.generate([FAMILY[0]], SamplingParams(max_new_tokens=1), speculate=speculate)
        found.append(engine.page_counts.reused - before)
    assert found[0] == found[2] == 0 < found[3] <= found[1]


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
