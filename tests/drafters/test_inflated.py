"""Heads on a target that was inflated: widened with the hidden states, they draft what they did."""

from functools import partial
from typing import Any

import pytest
import torch

from drafters import BlockDrafter, EagleDrafter, HydraDrafter, MedusaDrafter
from specdec import Drafter, DraftTree, Engine, SamplingParams, Target
from specdec.drafting.builders import ExpansionTree
from specdec.drafting.policies import ConfidenceNodes
from specdec.inflate import inflate
from tests.components import eagle3_head, hydra_heads, medusa_heads
from tests.drafters.test_block import VOCAB, head_for
from tests.models import tiny_model
from verifiers import TargetWalkVerifier

LARGER = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128,
}  # fmt: skip
TREE = ExpansionTree(12, 4, 4)
MARKOV = {"shifted": True, "markov_rank": 6, "confidence": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "gated": MARKOV | {"markov_head_type": "gated"}, "rnn": MARKOV | {"markov_head_type": "rnn"},
    "selector": {"selector_rank": 6}, "domino": {"gru_hidden_dim": 5, "emb_dim": 6}, "xpress": {"xpress_rank": 6},
}  # fmt: skip


def block(model: Any, **parts: Any) -> Drafter:
    """Where there is one, the confidence decides how much is drafted."""
    passes = {"passes": 0} if "xpress_rank" in parts else {}
    drafter = BlockDrafter(head_for(Target(model), hidden_layers=(0, 1), **parts), 4, sampling="iid", **passes)
    return drafter.pruned_by(ConfidenceNodes(0.3, learn=False)) if "confidence" in parts else drafter


DRAFTERS = {
    "eagle3": lambda model: EagleDrafter(eagle3_head(model), TREE),
    "hydra_plus": lambda model: HydraDrafter(hydra_heads(model, num_layers=2, prefix=True), [4, 2]),
    "medusa": lambda model: MedusaDrafter(medusa_heads(model), [4, 2]),
} | {name: partial(block, **parts) for name, parts in BLOCKS.items()}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_head_drafts_what_it_did(name: str) -> None:
    """New channels carry nothing, and the user's heads are left as they are."""
    model = tiny_model("llama_mqa_tied", vocab_size=VOCAB, scale=2.0, layers=2)
    drafter, found, laws = DRAFTERS[name](model), [], []
    for target in (Target(model), Target(inflate(model, LARGER))):
        with Engine(target, drafter, TargetWalkVerifier(), max_batch_size=2, max_length=48) as engine:
            trees: list[DraftTree] = []
            engine.on_round = lambda seen, trees=trees: trees.append(seen.tree)
            outputs = engine.generate([[1, 2, 3], [3, 3, 8, 1]], SamplingParams(max_new_tokens=12, temperature=1.0))
            drafts = [(tree.tokens * tree.valid).tolist() for tree in trees]
            found.append((drafts, [(step.token_ids, step.accepted) for output in outputs for step in output.steps]))
            laws.append([tree.draft_probs[tree.valid] for tree in trees if tree.draft_probs is not None])
            session: Any = engine.session
    assert found[0] == found[1] and max(len(rows[0]) for rows in found[0][0]) > 1
    torch.testing.assert_close(laws[0], laws[1], atol=1e-3, rtol=1e-3, equal_nan=True)
    if name in BLOCKS:
        assert laws[0] and session.models[0].facts.layers[0].key_heads == 3, "the larger target's head costs more"
        sizes = {int(row.sum()) for tree in trees for row in tree.valid}
        assert len(sizes) > 2 or "confidence" not in BLOCKS[name], "no draft was shortened"
