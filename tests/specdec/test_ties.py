"""What a dtype explains at one place, and the exactness harness itself: neither can excuse itself."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdec import DraftSampling, DraftTree, Engine, SamplingParams, Target, TreeShape
from specdec.checks import ties
from specdec.checks.drafts import enumerate_drafts, sample_drafts
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.checks.ties import FLOOR_ULPS, Tie, examine
from specdec.wellformed import check_drafts
from tests.models import tiny_model
from tests.specdec.invariant_forwards import chain
from tests.verifiers.cases import tables_of
from verifiers import BlockVerifier, KSeqVerifier, RejectionVerifier

GREEDY = SamplingParams(max_new_tokens=8)
SEQUENCE = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPT, VOCAB = 4, 32


def examined(model: PreTrainedModel, tokens: tuple[int, int], sampling: SamplingParams = GREEDY, **more: Any) -> Tie:
    return examine(model, SEQUENCE, tokens, sampling, prompt_length=PROMPT, **more)


def scores(*values: float) -> Any:
    """A logits processor that puts the first tokens' scores in place of the model's, and -10 for all others."""
    made = torch.tensor([[*values, *[-10.0] * (VOCAB - len(values))]])
    return lambda input_ids, given: made


def test_margins_by_hand(model: PreTrainedModel) -> None:
    """They count from the largest logit: a near tie of two others excuses nothing. Processors count, and penalties."""
    with torch.inference_mode():
        logits = model(torch.tensor([SEQUENCE])).logits[0, -1]
    best, second, third = logits.topk(3).indices.tolist()
    for tokens, other in (((second, best), second), ((third, second), third)):
        assert examined(model, tokens).margin == pytest.approx(float(logits[best] - logits[other]), abs=1e-5)
    impossible = replace(GREEDY, logits_processor=scores(5.0, -torch.inf))
    assert examined(model, (1, 0), impossible) == Tie(None, None)
    # Token 1 stands in the sequence and is penalized, before the processor sees the scores.
    bias = torch.nn.functional.one_hot(torch.tensor([7]), 32)
    sampling = replace(GREEDY, repetition_penalty=3.0, logits_processor=lambda ids, given: given + bias)
    seen, expected = torch.tensor(sorted(set(SEQUENCE))), logits.clone()
    expected[seen] = torch.where(expected[seen] > 0, expected[seen] / 3, expected[seen] * 3)
    expected += bias[0]
    found = examined(model, (1, 7), sampling).margin
    assert found == pytest.approx(float(expected.max() - expected[[1, 7]].min()), abs=1e-5)


def test_the_bound_follows_the_dtype() -> None:
    """Its floor is a few units in the last place; what is measured on top is of the same order."""
    bounds = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = tiny_model(vocab_size=32).to(dtype)
        with torch.inference_mode():
            largest = float(model(torch.tensor([SEQUENCE])).logits[0, -1].abs().max())
        power = 2.0 ** torch.tensor(largest).log2().floor().item()
        # float64's logits are compared in float32, so its unit counts.
        unit = torch.finfo(torch.float32 if dtype is torch.float64 else dtype).eps * power
        bound = examined(model, (0, 1)).bound
        assert (1 if dtype is torch.bfloat16 else FLOOR_ULPS) * unit <= bound < 40 * unit
        bounds[dtype] = bound
    assert bounds[torch.float64] <= bounds[torch.float32] < 1e-3 * bounds[torch.bfloat16]


def test_float32_confirms_what_16_bits_leave_open(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin is that of the same weights in float32, however near each other 16 bits have brought two logits."""
    halves = tiny_model(vocab_size=VOCAB).to(torch.bfloat16)
    wide, short = deepcopy(halves).float(), halves.get_output_embeddings()
    pairs = [(first, first + 1) for first in range(0, VOCAB, 2)]
    found = [examined(halves, pair) for pair in pairs]
    for tie, pair in zip(found, pairs, strict=True):
        assert tie.margin == pytest.approx(examined(wide, pair).margin, abs=1e-5)
    short.register_forward_hook(lambda module, given, logits: logits * 0 if logits.dtype is torch.bfloat16 else logits)
    assert [examined(halves, pair).margin for pair in pairs] == [tie.margin for tie in found]
    monkeypatch.setattr(ties, "_run_in_float32", lambda *given: None)
    assert {examined(halves, pair).margin for pair in pairs} == {0.0}, "without it, logits that are wrong are ties"


def test_a_masked_vocabulary_does_not_widen_the_bound(model: PreTrainedModel) -> None:
    """Some models write a huge negative number where a token may never be chosen: that is no logit's size."""
    masked = tiny_model(vocab_size=32)
    output = masked.get_output_embeddings()
    output.bias = torch.nn.Parameter(torch.zeros(32))
    plain = examined(masked, (0, 1)).bound
    for value in (-1e4, -torch.inf):
        output.bias.data[31] = value
        assert examined(masked, (0, 1)).bound == plain


def test_a_quantized_cache_is_part_of_the_model_that_is_examined() -> None:
    """The margin is that of the distribution which the methods followed, and not of the one in full precision."""
    model = tiny_model(vocab_size=VOCAB)
    engine = Engine(Target(model), max_length=32, kv_cache="int8")
    with torch.inference_mode():
        logits = chain(engine.runner, torch.tensor(SEQUENCE))[-1]
        full = model(torch.tensor([SEQUENCE])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    margin = float(logits[best] - logits[second])
    assert abs(margin - float(full[best] - full[second])) > 1e-3, "nothing would be noticed"
    tie = examined(model, (second, best), kv_cache="int8")
    assert tie.margin == pytest.approx(margin, abs=1e-4)
    assert tie.bound < margin


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_models_of_16_bits_are_judged_by_their_own_passes(scheme: str) -> None:
    """Their packed weights are read in the model's dtype alone: a pass in float32 would read noise."""
    target = Target.from_pretrained("bundled/target", dtype="bfloat16", device="cpu", quantization=scheme)
    with torch.inference_mode():
        logits = target.model(torch.tensor([SEQUENCE])).logits[0, -1].float()
    best, second = logits.topk(2).indices.tolist()
    tie = examined(target.model, (second, best))
    assert tie.margin == pytest.approx(float(logits[best] - logits[second]), abs=1e-5)
    assert tie.bound is not None and 0 < tie.bound < 2


IID, SWOR = DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT
COIN = {(): [0.5, 0.5], (0,): [1.0, 0.0], (1,): [0.25, 0.75]}


def test_malformed_drafts_and_rows_that_are_no_distributions() -> None:
    """Other flaws of trees and q: ``test_drafter_checks.py``."""
    half, parents = torch.full((2, 3, 2), 0.5), torch.tensor([[-1, 0, 0]] * 2)
    tree = DraftTree.build(parents * 0, parents, sampling=IID, draft_probs=half)
    above, nowhere = half.clone(), half.clone()
    above[1, 2, 0], nowhere[0, 1, 0] = 0.6, torch.nan
    for rule, drafted, p, words in (
        (RejectionVerifier(), replace(tree, draft_probs=None), half, "row 0, node 1: .* no draft_probs"),
        (RejectionVerifier(), tree, above, "row 1, node 2: p after it sums to 1.1"),
        (RejectionVerifier(), tree, nowhere, "row 0, node 1: p after it .* not finite"),
        (BlockVerifier(), tree, half, "row 0, node 2: .* BlockVerifier takes chains only"),
    ):
        with pytest.raises(ValueError, match=words):
            check_drafts(rule, drafted, p)
    with pytest.raises(ValueError, match=r"p after \(1,\) sums to 0.95"):
        tables_of(COIN | {(1,): [0.25, 0.7]}, COIN)
    with pytest.raises(ValueError, match="node 1: it is WITHOUT_REPLACEMENT, and KSeqVerifier takes "):
        enumerate_outcome(KSeqVerifier(), Tables.random(3, 2, seed=0), TreeShape.chain(2), SWOR)


def test_the_sample_is_of_the_enumerated_law() -> None:
    tables, shape = Tables.random(3, 2, seed=2, kinds=("dense", "exhausted", "zeros")), TreeShape.branching(3, 1)
    laws = (SWOR, SWOR, IID)
    exact, sample = enumerate_drafts(tables, shape, laws), sample_drafts(tables, shape, laws, 4000, seed=1)
    assert sample.probability.sum().item() == pytest.approx(1)
    place = 3 ** torch.arange(shape.num_nodes + 1)
    chance = torch.zeros(3 ** len(place), dtype=torch.float64)
    counts = chance.clone()
    chance.index_add_(0, (exact.tree.tokens * place).sum(1), exact.probability)
    counts.index_add_(0, (sample.tree.tokens * place).sum(1), sample.probability)
    assert (counts[chance == 0] == 0).all()
    assert (chance - counts).abs().max() < 4 / 4000**0.5 / 2


def test_a_tie_takes_no_more_passes_than_explain_it(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a large model takes seconds; what nothing explains takes them all."""
    run, passes = ties._run_model, []
    monkeypatch.setattr(ties, "_run_model", lambda *given: (passes.append(given[2]), run(*given))[1])
    cuts = [(), *ties._cuts(len(SEQUENCE), PROMPT)]
    for second, taken in ((5.0, cuts[:1]), (4.0, cuts)):
        passes.clear()
        tie = examined(model, (0, 1), replace(GREEDY, logits_processor=scores(5.0, second)))
        assert passes == taken and (tie.bound >= tie.margin) == (second == 5.0)
