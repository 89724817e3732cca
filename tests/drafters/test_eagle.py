"""EAGLE's heads and their targets: what fits, and what binding changes."""

from typing import Any

import pytest
import torch

from drafters.eagle import EagleDrafter
from drafters.heads.eagle import Eagle3Head, EagleHead
from specdec.drafting.builders import ExpansionTree, StaticTree
from specdec.drafting.scored import ScoredSession
from specdec.engine.engine import Engine
from specdec.interfaces import Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import DraftSampling
from tests.drafters.eagle_heads import VOCAB, eagle3
from tests.models import tiny_model
from verifiers import RejectionVerifier, TargetWalkVerifier


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=VOCAB)


def bind(head: EagleHead | Eagle3Head, target, **options: Any) -> ScoredSession:
    drafter = EagleDrafter(head, 2, name="H", **options)
    return drafter.bind(Target(target), Sizes(max_batch_size=1, max_length=32))


def test_the_layers_of_a_head_that_names_none_are_the_usual_ones(model) -> None:
    deep = tiny_model("llama", vocab_size=VOCAB, layers=8)
    head = eagle3(model)
    head.hidden_layers = None
    assert bind(head, deep).hidden_layers == (2, 4, 5)
    assert bind(head, deep, hidden_layers=(1, 2, 3)).hidden_layers == (1, 2, 3)


def test_trees_and_laws_by_default(model) -> None:
    head = eagle3(model)
    assert isinstance(EagleDrafter(head).tree, ExpansionTree)
    assert EagleDrafter(head).laws == {DraftSampling.DETERMINISTIC}
    assert isinstance(EagleDrafter(head, 4).tree, StaticTree)
    assert EagleDrafter(head, 4).laws == {DraftSampling.IID}


def test_binding_changes_no_head_and_shares_its_weights(model) -> None:
    """A head in training drafts with the weights that are trained, and keeps its modules, dtype and configuration."""
    head = eagle3(model).train()
    before = (head.lm_head, head.model.embed_tokens, head.config.max_position_embeddings, head.training)
    drafter = bind(head, model)
    bound = drafter.models[0].model
    assert (head.lm_head, head.model.embed_tokens, head.config.max_position_embeddings, head.training) == before
    shared = dict(bound.named_parameters())
    assert all(shared[name] is parameter for name, parameter in head.named_parameters())
    with torch.no_grad():
        head.model.fusion.linear.weight.mul_(2.0)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="its weights were written to"):  # a training calls Engine.weights_changed
        _ = drafter.models[0].version


def test_a_head_of_another_dtype_is_cast_and_its_frequencies_are_not(model) -> None:
    head = eagle3(model)
    wanted = head.model.rotary_emb.inv_freq.clone()
    half = bind(head, tiny_model("llama", vocab_size=VOCAB).to(torch.bfloat16)).models[0].model
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(half.model.rotary_emb.inv_freq, wanted)
    assert head.dtype == torch.float32


def test_a_prompt_of_one_token_has_nothing_to_begin_with(model) -> None:
    """The first round drafts nothing for it, and the second round does, while its batch mate drafts in both."""
    with Engine(Target(model), EagleDrafter(eagle3(model), 2), RejectionVerifier(), max_batch_size=2) as engine:
        one, other = engine.generate([[5], [1, 2, 3, 4]], SamplingParams(max_new_tokens=6))
    assert [step.proposed_nodes for step in one.steps[:2]] == [0, 2]
    assert other.steps[0].proposed_nodes == 2


def test_positions_beyond_those_of_the_training_texts(model) -> None:
    """Published heads state 2048 positions and are used far beyond them."""
    head = eagle3(model)
    head.config.max_position_embeddings = 8
    with Engine(Target(model), EagleDrafter(head, 2), TargetWalkVerifier(), max_length=40) as engine:
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30))[0].token_ids) == 30
    scaled = eagle3(model)
    scaled.config.max_position_embeddings = 8
    scaled.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=r"the head Eagle3Head: max_length=40 is beyond the 8"):
        Engine(Target(model), EagleDrafter(scaled, 2), TargetWalkVerifier(), max_length=40)
