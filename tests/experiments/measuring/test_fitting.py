"""Prompts that are too long: what is left of them, by hand."""

import pytest

from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import fit, needed_tokens, render
from specdec.requests import SamplingParams
from tests.experiments.conftest import byte_tokenizer

SAMPLING = SamplingParams(max_new_tokens=10)
SHORT = Prompt(id="short", turns=("ab",))
LONG = Prompt(id="long", turns=("0123456789" * 10,))
CHAT = Prompt(id="chat", turns=("begin " + "x" * 100 + " end", "more"), chat=True)


def fitted(*prompts: Prompt, policy: str, room: int = 60) -> tuple[list[Prompt], str | None]:
    found = fit(prompts, SAMPLING, byte_tokenizer(), max_length=room, policy=policy)
    return found.prompts, found.sentence


def test_one_token_too_many_is_too_long() -> None:
    prompts, sentence = fitted(SHORT, LONG, policy="skip", room=109)
    assert prompts == [SHORT]
    for words in ("1 of 2 prompts", "engine.max_length=109", "the longest needs 110", "1 left out", "too_long=cut"):
        assert sentence is not None and words in sentence


def test_a_text_keeps_its_end() -> None:
    (prompt,), sentence = fitted(LONG, policy="cut")
    assert byte_tokenizer().decode(list(render(prompt, byte_tokenizer()))) == ("0123456789" * 5)
    assert sentence is not None and "1 shortened; dataset.too_long=skip leaves them out" in sentence


def test_a_token_before_every_text_stays_in_front() -> None:
    tokenizer = byte_tokenizer()
    plain = tokenizer("wxyz")["input_ids"]
    first = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    marked = Prompt(id="a", turns=("<|endoftext|>wxyz",), last_tokens=3)
    assert render(marked, tokenizer) == (first, *plain[-2:])
    assert render(Prompt(id="a", turns=("wxyz",), last_tokens=3), tokenizer) == tuple(plain[-3:])
    with pytest.raises(ValueError, match="prompt a has 4 tokens, and 5 were asked for"):
        render(Prompt(id="a", turns=("wxyz",), last_tokens=5), byte_tokenizer())


def test_a_conversation_loses_the_middle_of_its_longest_turn() -> None:
    (prompt,), _ = fitted(CHAT, policy="cut", room=90)
    long, short = prompt.turns
    assert short == "more" and long.startswith("begin x") and long.endswith("x end") and "[...]" in long
    assert 80 < needed_tokens(prompt, SAMPLING, byte_tokenizer()) <= 90, "not more than it must"
    prompts, sentence = fitted(SHORT, CHAT, policy="cut", room=45)
    assert prompts == [SHORT] and sentence is not None and "1 left out" in sentence, "nothing would be left of it"
