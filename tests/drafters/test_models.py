"""Drafting models, beyond what the generic tests see: coupled drafts, and other tokenizers."""

from typing import Any

import pytest
import torch

from drafters import ModelDrafter, SLEMDrafter, TLIDrafter
from specdec import Batch, DraftSampling, Engine, SamplingParams, Sizes, Target
from specdec.checks.reference import reference_decode
from specdec.random import request_key, shared_noise
from tests.architectures import tiny
from tests.components import lettered, perturbed, renumbered, text_drafter
from tests.drafters.agreeing import agreements
from tests.forwards import drafted, inner_paths, slots_of
from tests.models import tiny_model
from verifiers import RejectionVerifier, SharedNoiseVerifier

VOCAB = 24
PROMPTS = [[1, 2, 3, 1, 2], [5, 6, 5]]
SHAPE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_new_tokens=12)


def test_coupled_children_are_the_first_in_the_race_and_greedy_rows_get_the_top_k(model) -> None:
    twin, seen = perturbed(model, 0.3), []
    drafter, wanted = ModelDrafter(twin, SHAPE, sampling="coupled"), [SamplingParams(max_new_tokens=12), SAMPLED]
    with Engine(Target(model), drafter, SharedNoiseVerifier(), max_batch_size=2, max_length=64) as engine:
        engine.on_round = lambda each: seen.append((each.tree, [list(row.tokens) for row in each.requests if row]))
        engine.generate(PROMPTS, wanted)
    whole = [each for each in seen if each[0].valid.all() and len(each[1]) == 2]
    assert len(whole) > 2
    for tree, sequences in whole:
        assert tree.draft_probs is None
        assert tree.law[:, 1:].tolist() == [[DraftSampling.DETERMINISTIC] * 5, [DraftSampling.COUPLED] * 5]
        for row, known in enumerate(sequences):
            for node, (_, *above) in inner_paths(tree, row).items():
                children = tree.tokens[row, tree.parents[row] == node]
                scores = twin(torch.tensor([[*known, *above]])).logits[0, -1] / 0.9
                position = torch.tensor([[len(known) + len(above)]])
                noise = shared_noise(torch.tensor([request_key(3, 1)]), position, VOCAB)[0, 0]
                race = scores.log_softmax(-1) - noise.log() if row else scores
                assert children.tolist() == race.topk(len(children)).indices.tolist()


# Another tokenizer


TEXTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 5]
SIZES = Sizes(max_batch_size=2, max_length=32)


def decode(target: Target, drafter: Any, prompts=TEXTS, *, max_length: int = 64, **sampling: Any):
    engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=max_length)
    return engine.generate(list(prompts), SamplingParams(**{"max_new_tokens": 20, **sampling}))


def test_q_is_the_models_law_over_the_common_tokens_after_the_text_in_its_own(model) -> None:
    """The target's tokens a, b, c are one of the drafter's (abc), so the context is shorter there."""
    names = [chr(ord("a") + number) for number in range(VOCAB)]
    own = ["abc", "ab", *reversed(names[:-4])]
    twin, tokenizer = tiny_model("llama", vocab_size=len(own), layers=2, seed=5), lettered(own)
    drafter = TLIDrafter(twin, [2, 1], tokenizer=tokenizer, target_tokenizer=lettered(names), sampling="iid")
    common = torch.tensor([own.index(name) for name in names[:-4]])

    def law(known: list[int], path: list[int]) -> torch.Tensor:
        # A drafted token is fed as it is, even where the text has another token with it.
        text = tokenizer("".join(names[token] for token in known))["input_ids"]
        logits = twin(torch.tensor([[*text, *(own.index(names[token]) for token in path[1:])]])).logits[0, -1]
        return torch.cat([logits[common].softmax(0), torch.zeros(4)])

    found, _ = agreements(Target(model), drafter, law, prompts=[[0, 1, 2, 4, 0, 1], [3, 23, 3], [5, 0, 1]], atol=1e-5)
    assert all(same for _, same in found) and len(found) > 20


def same(model, kind: str, depth: int = 3, lacks: int | None = None, **options: Any):
    """A drafter that is the target with its tokens under other numbers."""
    names = [chr(ord("a") + number) for number in range(VOCAB)]
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)).tolist()
    order = [token for token in order if token != lacks]
    parts: Any = {"model": renumbered(model, order), "tokenizer": lettered([names[token] for token in order])}
    parts["target_tokenizer"] = lettered(names)
    return TLIDrafter(shape=depth, **parts, **options) if kind == "tli" else text_drafter(depth, **parts)


@pytest.mark.parametrize("kind", ["tli", "slem"])
def test_the_target_under_other_numbers_is_always_accepted(model, kind: str) -> None:
    """Also where requests wait for a slot, and one has no room for drafts, or more tokens than the drafter's places."""
    prompts, wanted = [*TEXTS, [5] * 5], SamplingParams(max_new_tokens=40)
    for max_length in (64, 26):
        outputs = decode(Target(model), same(model, kind), prompts, max_length=max_length, max_new_tokens=16)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.token_ids) == reference_decode(model, prompt, SamplingParams(max_new_tokens=16))
            assert [step.accepted for step in output.steps] == [step.proposed_depth for step in output.steps]
            assert len(output.steps) == 4
    drafter = same(model, kind)
    (drafter if kind == "tli" else drafter.drafter).model.config.max_position_embeddings = 16
    for output in decode(Target(model), drafter, max_new_tokens=40):
        assert list(output.token_ids) == reference_decode(model, list(output.prompt_ids), wanted)
        assert all(step.proposed_depth for step in output.steps[:-1])


def test_noise_belongs_to_a_token_not_to_its_column(model) -> None:
    """With noise that both share, equal laws draw equal tokens, though the drafter lacks the target's first one."""
    drafter = same(model, "tli", lacks=0, sampling="coupled")
    engine = Engine(Target(model), drafter, SharedNoiseVerifier(), max_batch_size=4, max_length=64)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=16, seed=3, n=4, stop_token_ids=(0,))
    steps = [step for output in engine.generate(list(TEXTS), sampling) for step in output.steps]
    missed = [step.token_ids[step.accepted] for step in steps if step.accepted < step.proposed_depth]
    assert len(steps) > 24 and set(missed) == {0}


def test_text_is_drafted_in_the_targets_tokens(model) -> None:
    """What the model writes is joined to the target's tokens, also across the end of the text."""
    names = [*"abcdefgh", "ab", "abc", "bc"]
    target = Target(tiny_model("llama", vocab_size=len(names), layers=1), lettered(names))
    twin, tokenizer = perturbed(tiny_model("llama", vocab_size=8, layers=1), 0.0), lettered(list("abcdefgh"))
    drafter = SLEMDrafter(ModelDrafter(twin, 4, tokenizer=tokenizer))
    session: Any = drafter.bind(target, SIZES)
    session._scorer.root_logits = lambda batch: said("b", batch)
    session._scorer.level_logits = lambda batch, tokens, topology, depth: said("bcab"[depth], batch)

    def said(letter: str, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(["abcdefgh".index(letter)]), 8).float().expand(len(batch), 1, 8)

    # After d: bc and ab. After a, which bc would be one token with: bc by itself, and ab.
    for sequence in ([3], [3, 0]):
        tree = drafted(session, slots_of([sequence], vocab_size=len(names), max_length=32))
        assert tree.tokens[0][tree.valid[0]].tolist() == [sequence[-1], 10, 8]
    # A row without room for four tokens has as many as it would have alone.
    tree = drafted(session, slots_of([[3], [3]], vocab_size=len(names), max_length=32, max_depth=[3, 9]))
    assert [tree.tokens[row][tree.valid[row]].tolist() for row in (0, 1)] == [[3, 10, 0], [3, 10, 8]]


def test_refusals(model) -> None:
    letters, twin = lettered([chr(ord("a") + number) for number in range(VOCAB)]), perturbed(model, 0.1)
    digits = lettered([str(number) for number in range(10)])
    with pytest.raises(ValueError, match=r"^the drafter llama and the target llama have no tokens in common, .*SLEM"):
        TLIDrafter(twin, 2, tokenizer=digits).bind(Target(model, letters), SIZES)
    with pytest.raises(ValueError, match=r"^the target llama has no tokenizer, and drafts go by the text"):
        TLIDrafter(twin, 2, tokenizer=letters).bind(Target(model), SIZES)
    with pytest.raises(ValueError, match=r"^mamba has recurrent layers, whose states cannot go back"):
        TLIDrafter(tiny("mamba", vocab_size=VOCAB), 2, tokenizer=letters).bind(Target(model, letters), SIZES)
    with pytest.raises(ValueError, match=r"the shape is a tree: give a length"):
        SLEMDrafter(ModelDrafter(twin, [2, 1], tokenizer=letters))
    with pytest.raises(ValueError, match=r"another vocabulary .* or drafter=tli or slem"):
        ModelDrafter(twin, tokenizer=digits).bind(Target(model, letters), SIZES)
