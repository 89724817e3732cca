"""What requests ask for: shares, spreads, beginnings in common; prompts of exact lengths out of texts."""

import string
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import pytest

from experiments.datasets.prompt import Prompt
from experiments.load.workloads import AsRecorded, Chats, Mix, Planned, Texts, ask, fitted
from specdec.requests import SamplingParams
from tests.experiments.conftest import byte_tokenizer

SHARES = {"short": {"share": 3, "input": 60, "output": 8}, "long": {"share": 1, "input": 400, "output": 90}}


def test_classes_have_their_shares_and_lengths_their_spread() -> None:
    def share_of(classes: Mapping[str, Any]) -> float:
        planned = Mix(classes).plan(np.random.default_rng(0), 4000)
        return float(np.mean([each.klass == "short" for each in planned]))

    def moments(spread: float, name: str) -> tuple[float, float]:
        planned = Mix({"a": {"input": 200, "output": 80, "spread": spread}}).plan(np.random.default_rng(1), 4000)
        found = np.array([getattr(each, name) for each in planned])
        return found.mean() / {"prompt_tokens": 200, "output_tokens": 80}[name], found.std() / found.mean()

    assert share_of(SHARES) == pytest.approx(0.75, abs=0.028), "four standard errors"
    assert share_of(SHARES | {"long": {"share": 1.3}}) != pytest.approx(0.75, abs=0.028), "another share"
    for name in ("prompt_tokens", "output_tokens"):
        assert moments(0.0, name) == (1.0, 0.0)
        assert moments(0.5, name) == pytest.approx((1.0, 0.5), abs=0.04), "spread leaves the mean alone"
        assert moments(0.6, name)[1] != pytest.approx(0.5, abs=0.04)


def test_a_class_gives_its_requests_what_schedulers_ask_for() -> None:
    tiers = Mix({"now": {"priority": 0, "deadline": 2.0}, "later": {"priority": 5}})
    planned = tiers.plan(np.random.default_rng(0), 60)
    assert {(each.klass, each.priority, each.deadline) for each in planned} == {("now", 0, 2.0), ("later", 5, None)}
    assert [each.pieces[0][0] for each in planned] == list(range(60)), "no two prompts begin alike"
    assert planned == tiers.plan(np.random.default_rng(0), 60) != tiers.plan(np.random.default_rng(1), 60)
    asked = [each.sampling for each in ask(planned[:20], texts(), SamplingParams(temperature=0.5, n=4))]
    assert [each.stream for each in asked] == list(range(20)) and all(each.n == 1 for each in asked)
    told = {(each.priority, each.deadline, each.max_new_tokens, each.temperature) for each in asked}
    assert told == {(0, 2.0, 64, 0.5), (5, None, 64, 0.5)}


def test_chats_begin_with_their_system_prompt_and_all_that_was_said() -> None:
    chats = Chats(systems=2, system=50, turns=3, said=7, output=5, open=4)
    planned = chats.plan(np.random.default_rng(0), 80)
    last: dict[int, Planned] = {}  # of every conversation, by the number of what the user said first
    for each in planned:
        turn = int(each.klass.removeprefix("turn "))
        assert each.prompt_tokens == 50 + 7 + (turn - 1) * 12 and each.output_tokens == 5
        assert each.pieces[0] in {(0, 50), (1, 50)}
        if turn > 1:
            before = last[each.pieces[1][0]]
            assert each.pieces[: len(before.pieces)] == before.pieces
            assert each.pieces[len(before.pieces)] == (before.pieces[-1][0] + 1, 5), "then comes the answer"
        last[each.pieces[1][0]] = each
    own = [number for each in last.values() for number, _ in each.pieces[1:]]
    assert len(set(own)) == len(own), "nothing else is shared"
    assert {each.klass for each in planned} == {"turn 1", "turn 2", "turn 3"} and len(last) > 20


def test_lengths_are_the_traces() -> None:
    recorded = pandas.DataFrame({"inputs": [700, 600, 90], "outputs": [4, 5, 6]})
    planned = AsRecorded().plan(np.random.default_rng(0), 2, recorded)
    assert [(each.pieces, each.output_tokens) for each in planned] == [(((0, 700),), 4), (((1, 600),), 5)]
    with pytest.raises(ValueError, match="workload=trace takes its lengths from the arrivals: give arrival=trace"):
        AsRecorded().plan(np.random.default_rng(0), 9)


def test_lengths_are_scaled_then_cut() -> None:
    asks = [Planned(klass="a", pieces=((0, 60), (1, 60)), output_tokens=tokens) for tokens in (20, 60, 400)]
    halves, cut = fitted(asks, 100, 0.5)
    assert [(each.prompt_tokens, each.output_tokens) for each in halves] == [(60, 10), (60, 30), (50, 50)]
    assert cut == 1 and halves[2].pieces == ((0, 30), (1, 20)), "a prompt from its end on"
    assert fitted(asks[2:], 50, 1.0)[0][0].pieces == ((0, 25),)


def texts(seed: int = 0, template: str | None = None) -> Texts:
    """26 texts of 40 tokens, each of a letter of its own."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    prompts = [Prompt(id=letter, turns=(letter * 40,), chat=template is not None) for letter in string.ascii_lowercase]
    return Texts(prompts, tokenizer, np.random.default_rng(seed))


def letters(ids: list[int]) -> set[str]:
    return set(byte_tokenizer().decode(ids)) & set(string.ascii_lowercase)


def test_prompts_are_as_long_as_asked_and_no_text_comes_twice_before_all_have() -> None:
    made, seen = texts(), set()
    sizes = [40, 1, 55, 90, 41, 40, 130, 7]
    for number, size in enumerate(sizes):
        ids = made.prompt(((number, size),))
        assert len(ids) == size and not letters(ids) & seen
        seen |= letters(ids)
    assert made.passes < 1
    count = 0
    while made.passes < 1:
        made.prompt(((100 + count, 40),))
        count += 1
    assert count > 5 and len(seen | letters(made.prompt(((100 + count - 2, 40),)))) > len(seen)
    assert made.prompt(((1000, 5000),))[:2] and len(made.prompt(((1000, 5000),))) == 5000, "longer than all texts"


def test_pieces_of_one_number_are_the_same_tokens_and_a_seed_decides_which() -> None:
    made = texts()
    first, second, short = (made.prompt(pieces) for pieces in (((0, 90), (1, 40)), ((0, 90), (2, 40)), ((0, 30),)))
    assert first[:90] == second[:90] and short == first[:30] and first[90:] != second[90:]
    assert texts().prompt(((0, 90), (1, 40))) == first != texts(seed=1).prompt(((0, 90), (1, 40)))


def test_the_chat_template_stands_around_every_prompt_and_counts() -> None:
    made = texts(template="<s>user: {{ messages[0].content }}</s>assistant:")
    for number, size in enumerate((60, 30)):
        ids = made.prompt(((number, size),))
        text = str(byte_tokenizer().decode(ids))
        assert len(ids) == size and text.startswith("<s>user: ") and text.endswith("</s>assistant:")
