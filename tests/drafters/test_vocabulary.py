"""Drafters that have some of the target's tokens: q is zero for the others, whose columns count for nothing."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import ModelDrafter, TLIDrafter
from drafters.reduced import DraftVocabulary
from specdec import SamplingParams, Sizes, Target
from specdec.drafting import vocabulary
from specdec.drafting.vocabulary import VocabularyMap
from specdec.quantization import quantize
from tests.components import DRAFTERS, lettered, reduced
from tests.forwards import slots_of
from tests.models import tiny_model
from tests.test_distribution import LEVEL, p_value
from verifiers import RejectionVerifier, TraversalVerifier

SAMPLED, SIZES = SamplingParams(temperature=1.0), Sizes(max_batch_size=1, max_length=32)


shared_tokens: Any = vocabulary.shared_tokens


def test_ids_that_spell_alike_are_shared(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model(vocab_size=700, layers=2), lettered([*"abcd", "ab"]), name="t")
    assert shared_tokens("d", lettered([*"abcd", "ab"]), 1400, target) is None, "padding is no other vocabulary"
    assert shared_tokens("d", None, 600, target) is None
    with caplog.at_level(logging.WARNING):
        assert shared_tokens("d", lettered([*"abcd"]), 4, target).tolist() == [0, 1, 2, 3]
    assert caplog.messages == [
        "the drafter d never drafts 1 of the 5 tokens of t: it lacks them, or spells others there"
    ]
    other = lettered([*"abdc", "dc", "ba"])
    with pytest.raises(ValueError, match=r"another vocabulary .*: 3 ids are spelled differently, as 2: 'd' and 'c'"):
        shared_tokens("d", other, 6, target)
    monkeypatch.setattr(vocabulary, "MOST_RESPELLED", 0.7)
    assert shared_tokens("d", other, 6, target).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"another vocabulary \(40 tokens\) than the target t \(700\); choose"):
        shared_tokens("d", None, 40, target)


def wrong_map(self: VocabularyMap, columns: torch.Tensor) -> torch.Tensor:
    """Columns are taken for their neighbours' tokens where they are drawn, not where q is written."""
    assert self.ids is not None
    return self.ids.roll(1)[columns]


def with_absent_ones(self: Any, table: torch.Tensor, empty: float) -> torch.Tensor:
    """Notes what the softmax would be shared with if it had the columns of absent tokens, too."""
    self.share = 1 - table[..., : self.common].softmax(-1)[..., self.absent].sum(-1, keepdim=True)
    return PRESENT(self, table, empty)


def of_that_softmax(self: Any, room: torch.Tensor, nodes: Any, q: torch.Tensor) -> None:
    PUT(self, room, nodes, q * self.share)


def not_renormalized(self: VocabularyMap, room: torch.Tensor, nodes: Any, q: torch.Tensor) -> None:
    PUT(self, room, nodes, 0.6 * q)


PRESENT, PUT = VocabularyMap.present, VocabularyMap.put
MUTANTS = {
    "model_respelled": (RejectionVerifier(), {"present": with_absent_ones, "put": of_that_softmax}),
    "model_reduced": (TraversalVerifier(), {"to_target": wrong_map}),
    "tli_tree_without_replacement": (RejectionVerifier(), {"put": not_renormalized}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_outputs_follow_the_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafters with the option, and all samples: tests/test_distribution.py, marked ``full``."""
    model, (rule, mutant) = tiny_model("llama", vocab_size=5, scale=1.5, layers=2), MUTANTS[name]
    assert p_value(model, name, rule, SAMPLED) > LEVEL
    for method, changed in mutant.items():
        monkeypatch.setattr(VocabularyMap, method, changed)
    assert p_value(model, name, rule, SAMPLED) < LEVEL


@torch.no_grad()
@pytest.mark.parametrize("name", ["pard_chain_iid", "uno_chain_iid", "mtp_chain_iid", "peagle_tree_without_replacement",
    "hydra", "redrafter_chain_iid", "exit_tree_without_replacement", "block_domino_tree", "block_refiner_tree",
    *(name for name in DRAFTERS if name.endswith("_reduced"))])  # fmt: skip
def test_a_reduced_layer_has_the_rows_of_the_whole_one(name: str) -> None:
    model, found = tiny_model("llama", vocab_size=32, layers=2), []
    for size in (None, 20):
        drafter: Any = DRAFTERS[name](model)
        drafter.vocabulary = DraftVocabulary(1, size)
        drafter = reduced(drafter) if size else drafter
        session, batch = drafter.bind(Target(model), SIZES), slots_of([[3, 5, 7]], vocab_size=32, max_length=32)
        scorer = session.scorer
        if hasattr(scorer, "newest"):
            scorer.newest.fill_(0.3)
        scorer.prepare(batch)
        scores = scorer.all_logits(batch, 1) if scorer.per_depth else scorer.root_logits(batch)
        found.append((scores, session.vocabulary))
    (whole, before), (some, after) = found
    ids = after.ids if after.ids is not None else torch.arange(after.common)
    assert len(ids) == some.shape[-1] == 20 and after.target == 32
    torch.testing.assert_close(some, whole[..., before.to_drafter(ids)], rtol=1e-5, atol=1e-5)


def test_a_quantized_layer_keeps_its_integers_and_a_tied_table_all_its_rows() -> None:
    for scheme in ("int8", "int4", None):
        whole: Any = tiny_model("gemma3", vocab_size=256, layers=2)
        assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
        if scheme is not None:
            quantize(whole, scheme, check=False)
        drafter: Any = reduced(ModelDrafter(whole, vocabulary=100))
        twin, ids = drafter.reduced(whole, Target(tiny_model(vocab_size=256)))
        assert ids.tolist() == list(range(156, 256)) and twin.get_input_embeddings().weight.shape[0] == 256
        assert twin.base_model is whole.base_model and len(whole.get_output_embeddings().weight) == 256
        hidden, output = torch.randn(3, whole.config.hidden_size), twin.get_output_embeddings()
        assert torch.equal(output(hidden), whole.get_output_embeddings()(hidden)[:, ids]) and output.out_features == 100
        described = drafter.describe(Target(tiny_model(vocab_size=256)))
        assert list(described.tokens or ()) == ids.tolist()


def test_the_most_frequent_tokens_of_a_text_and_all_ends_are_kept(tmp_path: Path) -> None:
    tokenizer = lettered([*"abcdefgh"])
    tokenizer.eos_token = "h"
    target = Target(tiny_model(vocab_size=10, layers=2), tokenizer)
    (tmp_path / "text").write_text("feefeef d")
    ids, places = DraftVocabulary(1, 4, tmp_path / "text").kept("d", 10, torch.tensor([0, 1, 4, 5, 6, 7]), target)
    assert ids.tolist() == [0, 4, 5, 7] and places.tolist() == [0, 2, 3, 5], "of equals the lower id"
    assert len(DraftVocabulary(1, 5).kept("d", 10, None, target)[0]) == 5


def test_what_cannot_be_reduced_is_refused(tmp_path: Path) -> None:
    model, target = tiny_model(vocab_size=32, layers=2), Target(tiny_model(vocab_size=32, layers=2))
    file = tmp_path / "text"
    file.write_text("a")
    for given, words in {
        "vocabulary=2: give at least 3, the most children": {"vocabulary": 2, "shape": [3, 1]},
        "vocabulary_corpus chooses the tokens of a vocabulary": {"vocabulary_corpus": str(file)},
        "vocabulary=33: the drafter llama has 32 tokens": {"vocabulary": 33},
        "the target llama has no tokenizer to count": {"vocabulary": 3, "vocabulary_corpus": file},
    }.items():
        with pytest.raises(ValueError, match=given):
            ModelDrafter(model, **{"shape": 2, **words}).bind(target, SIZES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keeps what both have in common: leave it out"):
        TLIDrafter(model, vocabulary=4, tokenizer=lettered(["a"]), target_tokenizer=lettered(["a"])).bind(target, SIZES)
