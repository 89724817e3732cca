"""Expected rounds along a text: cases by enumeration, two ways through the engine, what is refused, the comparison."""

import itertools
import json
import shutil
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.replay import replay
from experiments.tracing.along import Text, expected_rounds, rounds_of
from specdec import DraftSampling, DraftTree, Engine, SamplingParams, Target, TreeShape, Verifier
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from verifiers import (
    BlockVerifier,
    KSeqVerifier,
    RejectionVerifier,
    SharedNoiseVerifier,
    TargetWalkVerifier,
    TraversalVerifier,
    TypicalVerifier,
)

IID, COUPLED = DraftSampling.IID, DraftSampling.COUPLED
EOS, DEPTH, LAST = 2, 2, 4  # the token at position 4 is EOS for sure
CASES = {
    "one": ({0: [0.5, 0.3, 0.2], 1: [0.2, 0.6, 0.2]}, {0: [0.3, 0.5, 0.2], 1: [0.35, 0.35, 0.3]}),
    "two": ({0: [0.5, 0.3, 0.2], 1: [0.2, 0.6, 0.2]}, {0: [0.3, 0.3, 0.4], 1: [0.5, 0.2, 0.3]}),
}


class Chain:
    """A target and a drafter whose next token depends on the one before, and texts that EOS ends."""

    def __init__(self, case: str):
        exact = partial(torch.tensor, dtype=torch.float64)
        self._p, self._q = ({token: exact(law) for token, law in table.items()} for table in CASES[case])
        self._p[EOS] = self._q[EOS] = self._end = exact([0.0, 0.0, 1.0])

    def tables(self, position: int, before: int, drafted: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """P at the root and at every node of a chain, and q in whose place."""
        after = [before, *drafted]
        p = [self._end if position + at + 1 >= LAST else self._p[token] for at, token in enumerate(after)]
        return torch.stack(p)[None], torch.stack([self._q[token] for token in after])[None]

    def texts(self, text: tuple[int, ...] = (), chance: float = 1.0) -> Iterator[tuple[tuple[int, ...], float]]:
        if text and text[-1] == EOS:
            yield text, chance
            return
        p, _ = self.tables(len(text), text[-1] if text else 0, ())
        for token, own in enumerate(p[0, 0].tolist()):
            if own > 0:
                yield from self.texts((*text, token), chance * own)

    def along(self, rule: Verifier, text: tuple[int, ...], law: DraftSampling = IID) -> float:
        """The text's expected rounds by the rule's closed form."""
        reach = np.zeros((len(text), DEPTH))
        for done in range(len(text)):
            ahead = text[done : done + DEPTH]
            p, q = self.tables(done, text[done - 1] if done else 0, ahead)
            reach[done, : len(ahead)] = rule.along(p[:, :-1], q[:, :-1], torch.tensor([ahead]), law)[0]
        return rounds_of(reach)

    def mean(self, rule: Verifier, law: DraftSampling = IID) -> float:
        return sum(chance * self.along(rule, text, law) for text, chance in self.texts())

    def enumerated(self, rule: Verifier) -> float:
        """The expected rounds by all drafts and all that the rule's laws make of them."""

        @lru_cache(None)
        def rounds(position: int, before: int) -> float:
            total = 1.0
            for drafted in itertools.product(range(3), repeat=DEPTH):
                p, q = self.tables(position, before, drafted)
                chance = float(q[0, range(DEPTH), drafted].prod())
                tokens = torch.tensor([[before, *drafted]])
                tree = DraftTree.from_shape(TreeShape.chain(DEPTH), tokens, sampling=IID, draft_probs=q)
                laws = rule.laws(tree, p)
                for stop, ends in enumerate(laws.stop[0].tolist() if chance else ()):
                    following = laws.after(torch.tensor([stop]))[0].tolist() if EOS not in drafted[:stop] else ()
                    for token, own in enumerate(following):
                        if token != EOS and chance * ends * own > 0:
                            total += chance * ends * own * rounds(position + stop + 1, token)
            return total

        return rounds(0, 0)


RULES = [RejectionVerifier(), BlockVerifier(), TraversalVerifier(), TargetWalkVerifier()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_the_mean_over_texts_is_that_of_all_drafts_and_decisions(rule: Verifier, case: str) -> None:
    chain = Chain(case)
    assert chain.mean(rule) == pytest.approx(chain.enumerated(rule), abs=1e-12)


class Product(BlockVerifier):
    """Mutant: the tokens' own acceptance, as in rejection sampling, for a rule that looks at the block."""

    along = RejectionVerifier.along


def test_the_published_cases_and_their_mutants() -> None:
    """Numbers of a second program, which a rule's other closed form and a round behind the text's end do not have."""
    one, text = Chain("one"), (1, 1, EOS)
    assert [one.mean(rule) for rule in RULES[:2]] == pytest.approx([1.716750, 1.671250], abs=1e-6)
    assert [one.along(rule, text) for rule in RULES[:2]] == pytest.approx([1.416667, 1.027778], abs=1e-6)
    assert Chain("two").mean(SharedNoiseVerifier(), COUPLED) == pytest.approx(1.831500, abs=1e-6)
    assert one.mean(Product()) - one.enumerated(Product()) > 0.04
    # The token that ends the text is out with the round that rejects its draft: no further round begins.
    assert rounds_of(np.array([[0.3, 0.0]])) == 1.0


PROMPTS = [[1, 2, 3, 4], [5, 6, 7], [8, 1], [2, 2, 9, 3, 1]]


def served(target, drafter, rule: Verifier, sampling: SamplingParams, times: int) -> tuple[list[Text], list[int]]:
    """The outputs of an engine that drafts in every round, and the number of their rounds."""
    prompts = [prompt for prompt in PROMPTS for _ in range(times)]
    with Engine(target, drafter, rule, max_batch_size=16, max_length=40) as engine:
        engine.runner.joins = False
        done = engine.generate(prompts, sampling)
    return [(each.prompt_ids, each.token_ids) for each in done], [len(each.steps) for each in done]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("model_tree_iid", 0), ("hydra_plus", 0), ("block_by_confidence", 0), ("model_expansion", 1), ("ngram", 1)],
)
def test_what_is_not_drawn_takes_as_many_rounds_as_served(name: str, temperature: int) -> None:
    model = tiny_model(vocab_size=24)
    drafter = DRAFTERS[name](model)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=20, ignore_eos=True, seed=1)
    texts, rounds = served(Target(model), drafter, RejectionVerifier(), sampling, 3)
    rules = {"rejection": RejectionVerifier(), "walk": TargetWalkVerifier(), "shared": SharedNoiseVerifier()}
    found = expected_rounds(Target(model), drafter, rules, texts, sampling)
    assert found == dict.fromkeys(rules, rounds) and min(rounds) < 20


def test_served_rounds_of_a_head_agree_on_average() -> None:
    """Given its text, a run takes F rounds on average: 200 runs are within 5 standard errors (1 in 2 million)."""
    model = tiny_model(vocab_size=24)
    drafter, rule = DRAFTERS["eagle3_chain_iid"](model), BlockVerifier()
    sampling = SamplingParams(temperature=0.8, max_new_tokens=16, seed=2, repetition_penalty=1.3, top_p=0.9)
    texts, rounds = served(Target(model), drafter, rule, sampling, 50)
    (found,) = expected_rounds(Target(model), drafter, {"": rule}, texts, sampling, batch_size=16).values()
    off = np.array(rounds) - np.array(found)
    assert abs(off.mean()) < 5 * off.std() / len(off) ** 0.5
    assert np.var(found) < np.var(rounds) and np.ptp(off) > 1


def test_the_engine_reads_p_and_q_along_the_text() -> None:
    """The same from plain forwards of both models over the texts."""
    model, temperature = tiny_model(vocab_size=24), 0.7
    drafter = DRAFTERS["model_chain_iid"](model)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=12, seed=3, ignore_eos=True)
    texts, _ = served(Target(model), drafter, RejectionVerifier(), sampling, 2)
    rules = {"rejection": RejectionVerifier(), "block": BlockVerifier(), "walk": TargetWalkVerifier()}
    found = expected_rounds(Target(model), drafter, rules, texts, sampling, batch_size=3)
    for number, (prompt, text) in enumerate(texts):
        ids = torch.tensor([[*prompt, *text]])
        with torch.no_grad():
            p, q = [(each(ids).logits.double() / temperature).softmax(-1) for each in (model, perturbed(model, 0.1))]
        for name, rule in rules.items():
            reach = np.zeros((12, 3))
            for done in range(12):
                first, last = len(prompt) + done, min(len(prompt) + done + 3, len(prompt) + 12)
                rows = slice(first - 1, last - 1)
                reach[done, : last - first] = rule.along(p[:, rows], q[:, rows], ids[:, first:last], IID)[0]
            assert found[name][number] == pytest.approx(rounds_of(reach), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "rule", "more", "words"),
    [
        ("model_tree_iid", RejectionVerifier(), {}, "ModelDrafter draws siblings at random: compare served runs"),
        ("model_chain_iid", KSeqVerifier(), {}, "KSeqVerifier states no closed form of its rounds"),
        ("model_chain_iid", TypicalVerifier(), {}, "TypicalVerifier is not exact"),
        ("model_tree_deterministic", BlockVerifier(), {}, "BlockVerifier takes chains only"),
        ("adaptive", RejectionVerifier(), {}, "AdaptiveDrafter drafts by more than the text so far"),
        ("model_chain_iid", RejectionVerifier(), {"top_k": 1}, "the target excludes a token of a text"),
        ("model_chain_iid", RejectionVerifier(), {"stop_token_ids": [4]}, r"text 0 goes on behind its end \(stop\)"),
    ],
)
def test_what_has_no_closed_form_or_was_not_served_is_refused(name: str, rule: Verifier, more: Any, words: str) -> None:
    model, sampling = tiny_model(vocab_size=24), SamplingParams(temperature=1.0, **more)
    with pytest.raises(ValueError, match=words):
        expected_rounds(Target(model), DRAFTERS[name](model), {"": rule}, [([1, 2], [4, 4, 5, 4, 5])], sampling)


def test_drafters_and_rules_are_compared_on_runs_texts(traced_out: Path, configure, tmp_path: Path, capsys) -> None:
    """Two runs that plainly wrote the same: what the drafter of the other one gains is paired with the first one's."""
    shutil.copytree(traced_out, tmp_path / "deep", ignore=shutil.ignore_patterns("trace"))
    manifest = json.loads((traced_out / "manifest.json").read_text())
    manifest["config"]["drafter"]["shape"] = 4
    manifest["overrides"] += ["drafter.shape=4"]
    (tmp_path / "deep" / "manifest.json").write_text(json.dumps(manifest))
    words = [f"trace=[{traced_out},{tmp_path / 'deep'}]", "along=true", "verifiers=[rejection,block,typical]"]
    found = replay(configure("replay", *words, f"out={tmp_path / 'out'}", "bootstrap.resamples=100"))
    assert json.loads((tmp_path / "out" / "replay.json").read_text())["rows"] == found
    assert [row["rule"] for row in found if row["refused"]] == ["typical", "typical"]
    base, *others = (row for row in found if not row["refused"])
    assert len(others) == 3 and base.get("gain") is None
    for row in others:
        assert row["tokens_per_round"] == pytest.approx(12 / row["expected_rounds"])
        assert row["tokens_per_round_low"] <= row["tokens_per_round"] <= row["tokens_per_round_high"]
        assert row["gain"] == pytest.approx(row["tokens_per_round"] - base["tokens_per_round"]) and row["gain"] > 0
        assert row["gain_low"] <= row["gain"] <= row["gain_high"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "Expected rounds of texts that plain decoding wrote" in shown and "TypicalVerifier is not exact" in shown
