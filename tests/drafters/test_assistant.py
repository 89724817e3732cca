"""Gemma-4's assistants: their drafts are transformers', over the target's cache; what does not fit is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from drafters.assistant import AssistantDrafter, TargetKeys
from specdec import Engine, Sizes, Target
from specdec.attention.facts import Reach
from specdec.cache.transformers_cache import CACHE
from specdec.checks.drafter import assert_conforms
from tests.drafters.agreeing import agreements
from tests.drafters.folders import assert_same
from tests.gemma4 import KINDS, VOCAB, assistant, gemma
from tests.models import tiny_model
from verifiers import RejectionVerifier

PROMPTS = [[1, 2, 3, 1, 2, 5, 9, 4, 7], [5], [6, 2], [3, 3, 8, 1, 4, 12, 11]]


@torch.no_grad()
def law(target: Target, model: Any, shared: int, known: list[int], path: list[int]) -> torch.Tensor:
    """The law of what follows a path from the root on, by transformers' forwards: over the text, then step by step."""
    cache: Any = DynamicCache()
    done = target.model(torch.tensor([known[:-1]]), **{CACHE: cache}, output_hidden_states=True)
    layers = {kind: max(i for i in range(4 - shared) if (KINDS * 2)[i] == kind) for kind in KINDS}
    stored = {kind: (cache.layers[layer].keys, cache.layers[layer].values) for kind, layer in layers.items()}
    state, position = done.hidden_states[-1][:, -1:], torch.tensor([[len(known) - 1]])
    for token in path:
        embedding = target.model.get_input_embeddings()(torch.tensor([[token]]))
        joined = torch.cat([embedding, state], -1)
        step = model(inputs_embeds=joined, position_ids=position, shared_kv_states=stored)
        state = step.last_hidden_state
    logits = step.logits[0, -1]
    if model.config.use_ordered_embeddings:  # tokens outside of the nearest clusters have one less than all others
        logits = logits.masked_fill(logits == logits.min(), -torch.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize(
    ("shared", "clusters", "attention"), [(0, False, "auto"), (0, True, "grouped"), (2, False, "auto")]
)
def test_every_node_of_a_tree_has_its_own_path_s_law(shared: int, clusters: bool, attention: str, monkeypatch) -> None:
    """Not so of the mutant, whose windows are one shorter."""
    target, model = gemma(shared=shared), assistant(clusters=clusters)
    drafter = AssistantDrafter(model, [2, 2, 1], sampling="without_replacement")
    own, options = partial(law, target, model, shared), {"prompts": PROMPTS, "atol": 1e-5, "attention": attention}
    found, _ = agreements(target, drafter, own, **options)
    assert all(same for _, same in found) and len(found) > 40
    given = TargetKeys.__init__

    def shorter(self: TargetKeys, runner: Any, layers: Any, reaches: Any) -> None:
        given(self, runner, layers, {kind: Reach(each.window and each.window - 1) for kind, each in reaches.items()})

    monkeypatch.setattr(TargetKeys, "__init__", shorter)
    found, _ = agreements(target, drafter, own, **options)
    assert not all(same for _, same in found)


def test_it_keeps_the_contract() -> None:
    target, model = gemma(shared=0), assistant()
    few: Any = {"tokens": 6, "rounds": 6, "draws": 0, "max_length": 128, "verifier": RejectionVerifier()}
    assert_conforms(lambda: AssistantDrafter(model, 3), target, prompts=PROMPTS, **few)


def test_an_assistant_loads_from_its_public_layout(tmp_path: Path) -> None:
    model = assistant(clusters=True)
    model.save_pretrained(tmp_path)
    again = AssistantDrafter.from_pretrained(tmp_path, shape=2).assistant
    assert again.config.num_centroids == 4
    assert_same(again, model)


def test_what_is_no_pair_is_refused() -> None:
    target, plain = gemma(shared=0), Target(tiny_model(vocab_size=VOCAB))
    target.name = "tiny"
    for served, made, words in (
        (target, assistant(width=48), "hidden_size=48, and the target tiny has 32: give this target's assistant"),
        (target, assistant(vocab_size=24), "vocab_size=24, and the target tiny has 16"),
        (target, assistant(head_dim=4), "sliding_attention with 2 key heads of 4 channels, and .* has 2 of 8"),
        (plain, assistant(), r"sliding_attention with 2 key heads of 8 channels, and .* has no such layers"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(served, AssistantDrafter(made), RejectionVerifier(), max_length=32)
    with pytest.raises(ValueError, match="llama model and no assistant of Gemma-4"):
        AssistantDrafter(plain.model)
    with pytest.raises(ValueError, match="there are none here: run an engine"):
        AssistantDrafter(assistant()).bind(target, Sizes(max_batch_size=1, max_length=32))
