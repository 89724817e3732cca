"""Which prompts a run takes: by category, by number per category, and of which length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.datasets.context import Context
from experiments.datasets.prompt import Prompt, Selection, choose, fingerprint
from experiments.measuring.jobs import render
from tests.experiments.conftest import byte_tokenizer


@dataclass(frozen=True, kw_only=True)
class Letters(Selection):
    """Twelve prompts of category a, six of b, two of c."""

    def load(self) -> list[Prompt]:
        names = "ab" * 6 + "a" * 6 + "cc"
        return [Prompt(id=str(number), turns=("x",), category=name) for number, name in enumerate(names)]


def categories(**settings: object) -> str:
    return "".join(sorted(prompt.category for prompt in choose(Letters(**settings))[0]))  # type: ignore[arg-type]


def test_as_many_of_every_category() -> None:
    assert categories(per_category=2) == "aabbcc"
    assert categories(per_category=4) == "aaaabbbbcc", "a category that has fewer gives all"
    assert categories(per_category=3, count=2) == "aaabbbcc", "in place of the count"
    assert categories(per_category=2, only=["a", "c"]) == "aacc"


def test_a_categorys_prompts_do_not_depend_on_the_others() -> None:
    everything = choose(Letters(per_category=3, seed=4))[0]
    alone = choose(Letters(per_category=3, seed=4, only=["a"]))[0]
    assert [prompt for prompt in everything if prompt.category == "a"] == alone
    assert alone != choose(Letters(per_category=3, seed=5, only=["a"]))[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"only": ["d"]}, "no category 'd': choose among a, b, c"),
        ({"only": [3]}, r"dataset\.only=\[3\]"),
        ({"per_category": 0}, r"dataset\.per_category=0"),
        ({"too_long": "drop"}, r"dataset\.too_long='drop'"),
        ({"tokens": 0, "longest": 8}, r"dataset\.tokens=0"),
        ({"tokens": 9, "longest": 8}, r"dataset\.longest=8: give at least dataset\.tokens=9"),
    ],
)
def test_bad_choices(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose((Context if "tokens" in settings else Letters)(**settings))


def test_the_length_of_the_context_is_exact_and_the_places_stay() -> None:
    tokenizer = byte_tokenizer()
    chosen = {size: choose(Context(tokens=size, longest=64, count=5))[0] for size in (8, 64)}
    assert [prompt.id for prompt in chosen[8]] == [prompt.id for prompt in chosen[64]]
    for short, long in zip(chosen[8], chosen[64], strict=True):
        ids, more = render(short, tokenizer), render(long, tokenizer)
        assert (len(ids), len(more)) == (8, 64)
        assert more[-8:] == ids
    assert fingerprint(chosen[8]) != fingerprint(chosen[64])


def test_context_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(100)))
    prompts = Context(tokens=20, longest=30, files=str(tmp_path / "*.txt"), count=None).load()
    assert len(prompts) > 1
    assert all(len(prompt.turns[0]) >= 180 for prompt in prompts)
    assert {len(render(prompt, byte_tokenizer())) for prompt in prompts} == {20}
    with pytest.raises(ValueError, match=r"dataset\.longest=3000: no text of 18000 characters"):
        Context(longest=3000, files=str(tmp_path / "*.txt")).load()


def test_hashes_of_whole_prompts_are_those_of_earlier_runs() -> None:
    # Pinned: a change would keep earlier runs from being compared with new ones.
    assert fingerprint([Prompt(id="a", turns=("x", "y"), category="c", chat=True)]) == "bb2e9956140efbf9"
