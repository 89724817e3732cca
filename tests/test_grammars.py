"""Outputs under a grammar: equal to plain constrained decoding, token for token and in law, with any tree.

What a grammar allows is decided here by listing its texts, without xgrammar.
"""

import itertools
import re
import sys
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specdec.engine.recording as recording_module
from specdec import Engine, Paging, SamplingParams, Target, Verifier
from specdec.batch import Matchers
from specdec.requests import Grammar
from specdec.target.grammars import GrammarMatcher
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.shapes import shapes_unchecked
from tests.test_distribution import LEVEL, NO_RESIDUAL, goodness
from tests.verifiers.cases import complete, spread
from verifiers import RejectionVerifier, ThresholdVerifier, TraversalVerifier

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.usefixtures("untried")

TOKENS = ["a", "b", "c", "ab", "bc", "</s>"]
VOCAB, SCALE, END = len(TOKENS), 1.5, TOKENS.index("</s>")
PATTERNS = {"ends": "a(a|b){0,6}c", "counts": "(ab){1,2}c{0,3}|b[ac]b?c{2}", "short": "b?c"}
LONGEST = 8


@cache
def texts(pattern: str) -> frozenset[str]:
    every = ("".join(each) for n in range(LONGEST + 1) for each in itertools.product("abc", repeat=n))
    return frozenset(text for text in every if re.fullmatch(pattern, text))


@cache
def beginnings(pattern: str) -> frozenset[str]:
    return frozenset(text[:end] for text in texts(pattern) for end in range(len(text) + 1))


def allowed(pattern: str, so_far: str) -> list[int]:
    """Tokens that go on, by the list of texts."""
    going_on = [token for token in range(END) if so_far + TOKENS[token] in beginnings(pattern)]
    return going_on + [END] * (so_far in texts(pattern))


class Listed:
    """A logits processor that allows what the list of a grammar's texts does, after a prompt."""

    def __init__(self, pattern: str, prompt: int):
        self.pattern, self.prompt = pattern, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids[:, self.prompt :].tolist()):
            some = allowed(self.pattern, "".join(TOKENS[token] for token in ids))
            masked[row, some] = scores[row, some]
        return masked


def tokenizer(tokens: list[str] = TOKENS) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def target_of(model) -> Target:
    return Target(model, tokenizer())


def parents_mask(masks, self, tokens, paths) -> np.ndarray:
    """Mutant: every child is judged by what its parent allows."""
    bits, above = masks(self, tokens, paths), []
    for path in paths:
        nodes = np.flatnonzero(path)
        above.append(nodes[-2] if len(nodes) > 1 else 0)
    rows = {int(np.flatnonzero(path)[-1]): row for row, path in enumerate(paths)}
    return bits[[rows[int(node)] for node in above]]


def roots_mask(masks, self, tokens, paths) -> np.ndarray:
    """Mutant: the mask stands at the root alone; below it everything is allowed."""
    bits = masks(self, tokens, paths).copy()
    bits[1:] = -1
    return bits


PROMPTS = [[0, 1, 2], [4], [3, 3, 1, 0, 2], [2, 2], [1, 0, 1, 0], [2]]
GRAMMARS = [*PATTERNS.values(), PATTERNS["ends"], PATTERNS["counts"], None]
"""Of every prompt; one has none. They share a batch."""


def greedy_outputs(model, drafter: str, *, mask_drafts: bool) -> list[tuple[int, ...]]:
    made = DRAFTERS[drafter](model)
    engine = Engine(target_of(model), made, fitting(made), max_batch_size=3, max_length=40)
    grammars = [pattern and Grammar(regex=pattern, mask_drafts=mask_drafts) for pattern in GRAMMARS]
    wanted = [SamplingParams(max_new_tokens=8, grammar=g, min_new_tokens=i % 2 * 5) for i, g in enumerate(grammars)]
    return [output.token_ids for output in engine.generate(PROMPTS, wanted)]


@cache
def listed_outputs(model) -> list[tuple[int, ...]]:
    expected = []
    for index, (prompt, pattern) in enumerate(zip(PROMPTS, GRAMMARS, strict=True)):
        listed = pattern and Listed(pattern, len(prompt))
        sampling = SamplingParams(max_new_tokens=8, logits_processor=listed, min_new_tokens=index % 2 * 5)
        expected.append(tuple(reference_decode(model, prompt, sampling, stop_ids=frozenset([END]))))
    return expected


STRONG = {*itertools.product(("model_tree_iid", "model_expansion", "medusa", "ngram"), (True, False))}


@pytest.mark.parametrize(
    ("drafter", "mask_drafts"),
    [complete(*case, strong=case in STRONG) for case in sorted(STRONG.union(spread(DRAFTERS, (True, False))))],
)
def test_greedy_outputs_equal_plain_constrained_decoding(model, drafter: str, mask_drafts: bool) -> None:
    assert greedy_outputs(model, drafter, mask_drafts=mask_drafts) == listed_outputs(model)


def test_a_preempted_request_goes_on_in_its_grammar(model) -> None:
    grammar = Grammar(regex="(ab|ba|cc){8,20}")
    outputs = {}
    for pages in (None, 20):
        paging = None if pages is None else Paging(page_size=2, pages=pages, reserve=0.0)
        drafter = DRAFTERS["model_tree_iid"](model)
        engine = Engine(target_of(model), drafter, RejectionVerifier(), max_batch_size=3, max_length=40, cache=paging)
        made = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, grammar=grammar))
        outputs[pages] = [output.token_ids for output in made]
        assert (engine.page_counts.preempted > 0) == (pages is not None)
    assert outputs[20] == outputs[None]


@torch.inference_mode()
def listed_law(model, prompt: list[int], pattern: str, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every output up to its end or ``length`` tokens, from plain forwards."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in law.items():
            if output and output[-1] == END:
                longer[output] = mass
                continue
            tokens = torch.tensor([[*prompt, *output]])
            scores = Listed(pattern, len(prompt))(tokens, model(tokens).logits[:, -1].double())
            p = scores.softmax(-1)[0].tolist()
            longer |= {(*output, token): mass * p[token] for token in range(len(TOKENS)) if p[token] > 0}
        law = longer
    return law


def p_value(model, drafter: str, rule: Verifier, *, mask_drafts: bool) -> float:
    samples, length, prompt, pattern = 1500, 4, PROMPTS[0], PATTERNS["counts"]
    made = DRAFTERS[drafter](model, distance=0.6)
    engine = Engine(target_of(model), made, rule, max_batch_size=samples, max_length=32)
    grammar = Grammar(regex=pattern, mask_drafts=mask_drafts)
    with shapes_unchecked():
        wanted = SamplingParams(temperature=1.0, max_new_tokens=length, n=samples, grammar=grammar)
        outputs = engine.generate([prompt], wanted)
        law = listed_law(model, prompt, pattern, length)
    assert sum(step.accepted for output in outputs for step in output.steps) > 0, "nothing was ever accepted"
    return 0.0 if any(output.error for output in outputs) else goodness((o.token_ids for o in outputs), law)


@pytest.mark.parametrize("mask_drafts", [True, False])
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        complete("model_chain_iid", RejectionVerifier(), strong=False),
        complete("model_tree_without_replacement", TraversalVerifier(), strong=True),
        complete("block_markov_tree", TraversalVerifier(), strong=False),
        complete("medusa", RejectionVerifier(), strong=False),
    ],
    ids=["chain", "tree", "markov", "medusa"],
)
def test_sampled_outputs_follow_the_constrained_law(model, drafter: str, rule: Verifier, mask_drafts: bool) -> None:
    assert p_value(model, drafter, rule, mask_drafts=mask_drafts) > LEVEL


@pytest.mark.parametrize("mutant", [parents_mask, roots_mask])
def test_a_wrong_node_s_mask_changes_greedy_outputs_and_is_rejected_in_law(model, monkeypatch, mutant) -> None:
    masks = GrammarMatcher.masks
    monkeypatch.setattr(GrammarMatcher, "masks", lambda *given: mutant(masks, *given))
    assert greedy_outputs(model, "model_tree_iid", mask_drafts=False) != listed_outputs(model)
    assert p_value(model, "model_chain_iid", RejectionVerifier(), mask_drafts=False) < LEVEL


def test_a_biased_rule_is_rejected_under_a_mask(model) -> None:
    assert p_value(model, "model_chain_iid", NO_RESIDUAL, mask_drafts=True) < LEVEL


LONG = ["(ab|ba|cc){6,14}", None, "((a|b){2}c){5,9}", "(ca?b){7,12}"]


def long_outputs(model, drafter: str, recording: str, *, mask_drafts: bool) -> tuple[list[object], Engine]:
    """Tokens, drafts and accepted drafts of requests with a grammar and without, greedy and drawn, in one batch."""
    made = DRAFTERS[drafter](model)
    engine = Engine(target_of(model), made, fitting(made), max_batch_size=3, max_length=64, recording=recording)
    grammars = [pattern and Grammar(regex=pattern, mask_drafts=mask_drafts) for pattern in (*LONG, *LONG)]
    wanted = [
        SamplingParams(max_new_tokens=16 + 4 * n, temperature=float(n % 3 > 0), seed=n, grammar=grammars[n])
        for n in range(len(PROMPTS))
    ]
    steps = [[(s.token_ids, s.accepted, s.proposed_nodes) for s in o.steps] for o in engine.generate(PROMPTS, wanted)]
    return steps, engine


RECORDED = {("ngram", True), ("model_tree_without_replacement", False), ("model_expansion", True)}


@pytest.mark.parametrize(("drafter", "mask_drafts"), sorted(RECORDED))
def test_recorded_rounds_follow_grammars(model, drafter: str, mask_drafts: bool, monkeypatch) -> None:
    wanted, _ = long_outputs(model, drafter, "off", mask_drafts=mask_drafts)
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 2)
    for recording in ("auto", "rounds"):
        found, engine = long_outputs(model, drafter, recording, mask_drafts=mask_drafts)
        assert found == wanted
        counts = engine.recording_counts
        assert counts.replayed > 0 and not (counts.refused or counts.by_design)


@pytest.mark.parametrize("drafts", [True, False])
def test_masks_of_an_earlier_round_are_rejected(model, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a replay is given the masks that its stage was recorded with, of drafts or of what is judged."""
    wanted, _ = long_outputs(model, "model_tree_iid", "off", mask_drafts=True)
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 2)
    answer, first = Matchers.answer, {}

    def stale(self, question, **named):
        bits = answer(self, question, **named)
        return first.setdefault(question.shape, bits) if named.get("drafts", False) is drafts else bits

    monkeypatch.setattr(Matchers, "answer", stale)
    found, _ = long_outputs(model, "model_tree_iid", "rounds", mask_drafts=True)
    assert found != wanted


def test_schemas_and_rules_are_read_and_compiled_once(model) -> None:
    target = target_of(model)
    engine = Engine(target, max_length=40)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, grammar={"ebnf": 'root ::= "a" root "c" | "b"'}))
    info = target.grammars.compiled.cache_info()
    assert (info.misses, info.hits) == (1, len(PROMPTS) - 1)
    wide = Target(
        tiny_model(vocab_size=12, layers=2), tokenizer(['"', "{", "}", ":", "k", "1", "2", ",", "[", "]", "-", "</s>"])
    )
    schema = {"type": "object", "properties": {"k": {"type": "array", "items": {"enum": [1, 2]}}}, "required": ["k"]}
    grammar = Grammar(json_schema=schema, any_whitespace=True)
    [output] = Engine(wide).generate([[1]], SamplingParams(max_new_tokens=60, grammar=grammar, temperature=1.0))
    assert re.match(r'\{"k":\[((1|2)(,(1|2))*)?', output.text)


def test_what_cannot_be_followed_is_refused_before_any_work(model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, grammar: object, engine: Engine | None = None, **more: object) -> None:
        made = engine or Engine(target_of(model))
        with pytest.raises(ValueError, match=message):
            made.generate([[1, 2]], SamplingParams(max_new_tokens=8, grammar=grammar, **more))

    refused("cannot spell the grammar .*: no token goes on after 'ac'", {"regex": "ac[xyz]"})
    refused(r"cannot read the grammar 'a\(': Regex parsing error at position 3", {"regex": "a("})
    refused("give json_schema, regex or ebnf", {"regex": "a", "ebnf": "b"})
    refused("give a Grammar, or one of", "[ab]+")
    refused("a token that ends the output", {"regex": "a"}, ignore_eos=True)
    refused("needs a tokenizer", {"regex": "a"}, Engine(Target(model)), stop_token_ids=(5,))
    drafter = DRAFTERS["model_chain_iid"](model)
    lossy = Engine(target_of(model), drafter, ThresholdVerifier())
    refused("needs a rule that follows", {"regex": "a"}, lossy)
    assert lossy.generate([[1]], SamplingParams(grammar={"regex": "a"}), speculate=False)[0].text == "a"
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    refused(r"pip install 'specdec-research\[grammar\]'", {"regex": "a"})


def test_an_output_that_nothing_goes_on_ends_in_an_error(model) -> None:
    """Some texts of this grammar can be spelled, and not those that begin with b."""
    prefers_b = lambda ids, scores: scores + 50.0 * (torch.arange(scores.shape[1]) == 1)  # noqa: E731
    wanted = SamplingParams(max_new_tokens=8, grammar={"regex": "bx|cc"}, logits_processor=prefers_b)
    [output] = Engine(target_of(model)).generate([[1]], wanted)
    assert output.text == "b" and output.error == (
        "no token of the tokenizer goes on where the output has come to in its grammar"
    )
