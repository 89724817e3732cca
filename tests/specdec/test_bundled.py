"""The bundled hybrid and its head on real text: token for token what the model's own forwards give."""

import pytest

from drafters.eagle import EagleDrafter
from specdec import Engine, SamplingParams, Target
from specdec.checks.reference import reference_decode
from specdec.drafting.builders import ExpansionTree
from specdec.drafting.builders.base import TreeBuilder
from tests.shapes import shapes_unchecked
from verifiers import RejectionVerifier

TEXTS = ("import os\n\n\ndef read_lines(path):\n", "class Stack:\n    def __init__(self):\n", "    for name in ")


@pytest.mark.parametrize(
    "shape", [5, pytest.param(ExpansionTree(nodes=12, depth=5, width=4), marks=pytest.mark.full)], ids=["chain", "tree"]
)
def test_the_hybrid_writes_what_its_own_forwards_give(shape: int | TreeBuilder) -> None:
    """Ragged prompts, one slot fewer than requests; and the head knows the target, or it would draft for nothing."""
    target = Target.from_pretrained("bundled/hybrid", dtype="float32", device="cpu")
    assert target.tokenizer is not None
    greedy, texts = (
        SamplingParams(max_new_tokens=24, ignore_eos=True),
        [target.tokenizer(t)["input_ids"] for t in TEXTS],
    )
    drafter = EagleDrafter.from_pretrained("bundled/hybrid_eagle3", shape=shape)
    with shapes_unchecked(), Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
        wanted = [reference_decode(target.model, text, greedy) for text in texts]
        outputs = engine.generate(texts, greedy)
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(map(len, wanted)) > 2 * sum(len(output.steps) for output in outputs)
