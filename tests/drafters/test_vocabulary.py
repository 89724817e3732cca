"""Drafters that lack some of the target's tokens or number them otherwise: q is zero for what they do not have."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import ModelDrafter, SLEMDrafter, TLIDrafter
from drafters.reduced import DraftVocabulary
from specdec import Batch, Engine, SamplingParams, Sizes, Target
from specdec.drafting import vocabulary
from specdec.drafting.vocabulary import VocabularyMap
from specdec.quantization import quantize
from tests.architectures import tiny
from tests.components import DRAFTERS, lettered, perturbed, reduced, renumbered, text_drafter
from tests.drafters.agreeing import agreements
from tests.forwards import drafted, slots_of
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.test_distribution import LEVEL, p_value
from verifiers import RejectionVerifier, SharedNoiseVerifier, TraversalVerifier

VOCAB = 24
NAMES = [chr(ord("a") + number) for number in range(VOCAB)]
TEXTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 5, [5] * 5]
SIZES = Sizes(max_batch_size=2, max_length=32)
shared_tokens: Any = vocabulary.shared_tokens


def test_ids_that_spell_alike_are_shared(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model(vocab_size=700, layers=2), lettered([*"abcd", "ab"]), name="t")
    assert shared_tokens("d", lettered([*"abcd", "ab"]), 1400, target) is None, "padding is no other vocabulary"
    assert shared_tokens("d", None, 600, target) is None
    with caplog.at_level(logging.WARNING):
        assert shared_tokens("d", lettered([*"abcd"]), 4, target).tolist() == [0, 1, 2, 3]
    (message,) = caplog.messages
    assert message.startswith("the drafter d never drafts 1 of the 5 tokens of t: it lacks them, or spells others")
    other = lettered([*"abdc", "dc", "ba"])
    with pytest.raises(ValueError, match=r"another vocabulary .*: 3 ids are spelled differently, as 2: 'd' and 'c'"):
        shared_tokens("d", other, 6, target)
    monkeypatch.setattr(vocabulary, "MOST_RESPELLED", 0.7)
    assert shared_tokens("d", other, 6, target).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"another vocabulary \(40 tokens\) than the target t \(700\); choose"):
        shared_tokens("d", None, 40, target)


def with_absent_ones(self: Any, table: Tensor, empty: float) -> Tensor:
    """Notes what the softmax would be shared with if it had the columns of absent tokens, too."""
    self.share = 1 - table[..., : self.common].softmax(-1)[..., self.absent].sum(-1, keepdim=True)
    return PRESENT(self, table, empty)


PRESENT, PUT = VocabularyMap.present, VocabularyMap.put
MUTANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "model_respelled": (
        RejectionVerifier(),
        {"present": with_absent_ones, "put": lambda self, room, nodes, q: PUT(self, room, nodes, q * self.share)},
    ),
    # Columns are taken for their neighbours' tokens where they are drawn, not where q is written.
    "model_reduced": (TraversalVerifier(), {"to_target": lambda self, columns: self.ids.roll(1)[columns]}),
    "tli_tree_without_replacement": (
        RejectionVerifier(),
        {"put": lambda self, room, nodes, q: PUT(self, room, nodes, 0.6 * q)},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_outputs_follow_the_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafters with the option, and all samples: tests/test_distribution.py, marked ``full``."""
    model, (rule, mutant) = tiny_model("llama", vocab_size=5, scale=1.5, layers=2), MUTANTS[name]
    sampling = SamplingParams(temperature=1.0)
    assert p_value(model, name, rule, sampling) > LEVEL
    for method, changed in mutant.items():
        monkeypatch.setattr(VocabularyMap, method, changed)
    assert p_value(model, name, rule, sampling) < LEVEL


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


def test_q_is_the_models_law_over_the_common_tokens_after_the_text_in_its_own(model) -> None:
    """The target's tokens a, b, c are one of the drafter's (abc), so the context is shorter there."""
    own = ["abc", "ab", *reversed(NAMES[:-4])]
    twin, tokenizer = tiny_model("llama", vocab_size=len(own), layers=2, seed=5), lettered(own)
    drafter = TLIDrafter(twin, [2, 1], tokenizer=tokenizer, target_tokenizer=lettered(NAMES), sampling="iid")
    common = torch.tensor([own.index(name) for name in NAMES[:-4]])

    def law(known: list[int], path: list[int]) -> Tensor:
        # A drafted token is fed as it is, even where the text has another token with it.
        text = tokenizer("".join(NAMES[token] for token in known))["input_ids"]
        logits = twin(torch.tensor([[*text, *(own.index(NAMES[token]) for token in path[1:])]])).logits[0, -1]
        return torch.cat([logits[common].softmax(0), torch.zeros(4)])

    found, _ = agreements(Target(model), drafter, law, prompts=[[0, 1, 2, 4, 0, 1], [3, 23, 3], [5, 0, 1]], atol=1e-5)
    assert all(same for _, same in found) and len(found) > 20


def same(model, kind: str, lacks: int | None = None, **options: Any):
    """A drafter that is the target with its tokens under other numbers."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)).tolist()
    order = [token for token in order if token != lacks]
    parts: Any = {"model": renumbered(model, order), "tokenizer": lettered([NAMES[token] for token in order])}
    parts["target_tokenizer"] = lettered(NAMES)
    return TLIDrafter(shape=3, **parts, **options) if kind == "tli" else text_drafter(3, **parts)


@pytest.mark.parametrize("kind", ["tli", "slem"])
def test_the_target_under_other_numbers_is_always_accepted(model, kind: str) -> None:
    """Also where requests wait for a slot, and one has no room for drafts, or more tokens than the drafter's places."""
    whole, few = same(model, kind), same(model, kind)
    (few if kind == "tli" else few.drafter).model.config.max_position_embeddings = 16
    for drafter, max_length, tokens in ((whole, 64, 16), (whole, 26, 16), (few, 64, 40)):
        engine = Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=max_length)
        sampling = SamplingParams(max_new_tokens=tokens)
        for prompt, output in zip(TEXTS, engine.generate(TEXTS, sampling), strict=True):
            assert list(output.token_ids) == reference_decode(model, prompt, sampling)
            assert all(step.proposed_depth for step in output.steps[:-1])
            if drafter is whole:
                assert [step.accepted for step in output.steps] == [step.proposed_depth for step in output.steps]
                assert len(output.steps) == 4


def test_noise_belongs_to_a_token_not_to_its_column(model) -> None:
    """With noise that both share, equal laws draw equal tokens, though the drafter lacks the target's first one."""
    drafter = same(model, "tli", lacks=0, sampling="coupled")
    engine = Engine(Target(model), drafter, SharedNoiseVerifier(), max_batch_size=4, max_length=64)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=16, seed=3, n=4, stop_token_ids=(0,))
    steps = [step for output in engine.generate(TEXTS[:3], sampling) for step in output.steps]
    missed = [step.token_ids[step.accepted] for step in steps if step.accepted < step.proposed_depth]
    assert len(steps) > 24 and set(missed) == {0}


def test_text_is_drafted_in_the_targets_tokens(model) -> None:
    """The text that the model writes is joined to the target's tokens, also across the end of the text."""
    names = [*"abcdefgh", "ab", "abc", "bc"]
    target = Target(tiny_model("llama", vocab_size=len(names), layers=1), lettered(names))
    twin, tokenizer = perturbed(tiny_model("llama", vocab_size=8, layers=1), 0.0), lettered(list("abcdefgh"))
    drafter = SLEMDrafter(ModelDrafter(twin, 4, tokenizer=tokenizer))
    session: Any = drafter.bind(target, SIZES)
    session._scorer.root_logits = lambda batch: said("b", batch)
    session._scorer.level_logits = lambda batch, tokens, topology, depth: said("bcab"[depth], batch)

    def said(letter: str, batch: Batch) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(["abcdefgh".index(letter)]), 8).float().expand(len(batch), 1, 8)

    # After d: bc and ab. After a, which bc would be one token with: bc by itself, and ab.
    for sequence in ([3], [3, 0]):
        tree = drafted(session, slots_of([sequence], vocab_size=len(names), max_length=32))
        assert tree.tokens[0][tree.valid[0]].tolist() == [sequence[-1], 10, 8]
    # A row without room for four tokens has as many as it would have alone.
    tree = drafted(session, slots_of([[3], [3]], vocab_size=len(names), max_length=32, max_depth=[3, 9]))
    assert [tree.tokens[row][tree.valid[row]].tolist() for row in (0, 1)] == [[3, 10, 0], [3, 10, 8]]


def test_what_cannot_be_mapped_or_reduced_is_refused(model, tmp_path: Path) -> None:
    file, letters, twin, plain = tmp_path / "text", lettered(NAMES), perturbed(model, 0.1), Target(model)
    file.write_text("a")
    spelled, digits = Target(model, letters), lettered([str(number) for number in range(10)])
    both = {"tokenizer": lettered(["a"]), "target_tokenizer": lettered(["a"])}
    for target, words, kind, drafting, options in (
        (spelled, "have no tokens in common, .*SLEM", TLIDrafter, twin, {"tokenizer": digits}),
        (plain, "has no tokenizer, and drafts go by the text", TLIDrafter, twin, {"tokenizer": letters}),
        (spelled, "mamba has recurrent layers", TLIDrafter, tiny("mamba", vocab_size=VOCAB), {"tokenizer": letters}),
        (plain, "keeps what both have in common: leave it out", TLIDrafter, twin, {"vocabulary": 4, **both}),
        (spelled, "another vocabulary .* or drafter=tli or slem", ModelDrafter, twin, {"tokenizer": digits}),
        (plain, "vocabulary=2: give at least 3", ModelDrafter, twin, {"vocabulary": 2, "shape": [3, 1]}),
        (plain, "vocabulary_corpus chooses the tokens of a vocab", ModelDrafter, twin, {"vocabulary_corpus": file}),
        (plain, f"vocabulary=33: the drafter llama has {VOCAB} tokens", ModelDrafter, twin, {"vocabulary": 33}),
        (plain, "has no tokenizer to count", ModelDrafter, twin, {"vocabulary": 3, "vocabulary_corpus": file}),
    ):
        with pytest.raises(ValueError, match=words):
            kind(drafting, **{"shape": 2, **options}).bind(target, SIZES)
    with pytest.raises(ValueError, match=r"the shape is a tree: give a length"):
        SLEMDrafter(ModelDrafter(twin, [2, 1], tokenizer=letters))
