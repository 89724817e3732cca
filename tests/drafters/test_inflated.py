"""Heads on a target that was inflated: widened with the hidden states, they draft what they did."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters import BlockDrafter, EagleDrafter, HydraDrafter, MedusaDrafter
from specdec import Drafter, Engine, SamplingParams, Sizes, Target
from specdec.drafting.builders import ExpansionTree
from specdec.inflate import inflate
from tests.components import eagle3_head, hydra_heads, medusa_heads
from tests.drafters.test_block import VOCAB, head_for
from tests.forwards import drafted, outcome_of, slots_of
from tests.models import tiny_model
from verifiers import TargetWalkVerifier

LARGER = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128,
}  # fmt: skip
TREE = ExpansionTree(12, 4, 4)
DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "eagle3": lambda model: EagleDrafter(eagle3_head(model), TREE),
    "hydra": lambda model: HydraDrafter(hydra_heads(model), [4, 2]),
    "hydra_plus": lambda model: HydraDrafter(hydra_heads(model, num_layers=2, prefix=True), [4, 2]),
    "medusa": lambda model: MedusaDrafter(medusa_heads(model), [4, 2]),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_head_drafts_what_it_did(name: str) -> None:
    """New channels carry nothing, and the user's heads are left as they are."""
    model = tiny_model("llama_mqa_tied", vocab_size=VOCAB, scale=2.0, layers=2)
    drafter, found = DRAFTERS[name](model), []
    for target in (Target(model), Target(inflate(model, LARGER))):
        with Engine(target, drafter, TargetWalkVerifier(), max_batch_size=2, max_length=48) as engine:
            drafts: list[object] = []
            engine.on_round = lambda seen, drafts=drafts: drafts.append(seen.tree.tokens.tolist())
            outputs = engine.generate([[1, 2, 3], [3, 3, 8, 1]], SamplingParams(max_new_tokens=12))
            found.append((drafts, [(step.token_ids, step.accepted) for output in outputs for step in output.steps]))
    assert found[0] == found[1] and len(found[0][0][0][0]) > 1


PARTS: dict[str, dict[str, Any]] = {
    "selector": {"selector_rank": 6},
    "domino": {"gru_hidden_dim": 5, "emb_dim": 6},
    "xpress": {"xpress_rank": 6},
}


@pytest.mark.parametrize("kind", ["", "vanilla", "gated", "rnn", *PARTS])
def test_a_block_head_drafts_what_it_did(kind: str) -> None:
    model = tiny_model("llama_mqa_tied", vocab_size=VOCAB, scale=2.0, layers=2)
    markov = kind and kind not in PARTS
    parts = {"markov_rank": 6, "markov_head_type": kind, "confidence": True} if markov else PARTS.get(kind, {})
    head = head_for(Target(model), shifted=bool(markov), hidden_layers=(0, 1), **parts)
    ids = torch.randint(0, VOCAB - 1, (2, 7), generator=torch.Generator().manual_seed(5))
    drafts, sure = [], []
    for each in (model, inflate(model, LARGER)):
        session = BlockDrafter(head, 4).bind(Target(each), Sizes(max_batch_size=2, max_length=40))
        with torch.no_grad():
            hidden = each(ids[:, :6], output_hidden_states=True).hidden_states
        states = {layer: hidden[layer] for layer in session.hidden_layers}
        session.observe(outcome_of(torch.zeros(2, 6, dtype=torch.long), [6, 6], hidden_states=states))
        slots = slots_of(ids.tolist(), vocab_size=VOCAB, max_length=40)
        drafted(session, slots)
        drafts.append(session.scorer.root_logits(slots))
        sure.append(session.scorer.confidence(ids[:, :1], 2))
    assert session.models[0].facts.layers[0].key_heads == 3, "the larger target's head costs more"
    torch.testing.assert_close(drafts[0], drafts[1], atol=1e-3, rtol=1e-3)
    if markov:
        torch.testing.assert_close(sure[0], sure[1], atol=1e-3, rtol=1e-3)
