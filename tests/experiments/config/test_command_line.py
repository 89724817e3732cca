"""Words of the command line: overrides, flags, folders; and the line that a shell wants completed."""

from pathlib import Path

import pytest

from experiments.config.words import bare_words, completable, overrides_first


@pytest.mark.parametrize(
    ("given", "sorted_"),
    [
        ("drafter=mine --config-dir conf verifier=mine", "drafter=mine verifier=mine --config-dir conf"),
        ("-m drafter=a,b -cd conf seed=1", "drafter=a,b seed=1 -m -cd conf"),
        ("--cfg job drafter=a", "drafter=a --cfg job"),
        ("drafter=a --info", "drafter=a --info"),
        ("--info drafter=a", "drafter=a --info"),
        ("--info config drafter=a", "drafter=a --info config"),
        ("outputs/run --cfg job", "outputs/run --cfg job"),
        ("", ""),
    ],
)
def test_overrides_come_before_flags(given: str, sorted_: str) -> None:
    assert overrides_first(given.split()) == sorted_.split()


@pytest.mark.parametrize(
    ("given", "bare"),
    [
        ("outputs/run -cd conf seed=1", ["outputs/run"]),
        ("--config-dir conf outputs/run", ["outputs/run"]),
        ("job --cfg job", ["job"]),
        ("-m a b=1 c", ["a", "c"]),
        ("--help", []),
    ],
)
def test_bare_words(given: str, bare: list[str]) -> None:
    words = given.split()
    assert [words[position] for position in bare_words(words)] == bare


@pytest.mark.parametrize(
    ("line", "overrides", "flags"),
    [
        ("specdec-run drafter=n", "specdec-run drafter=n", []),
        ("specdec-run drafter=ngram ", "specdec-run drafter=ngram ", []),
        ("specdec-run ", "specdec-run ", []),
        ("specdec-run drafter=a -m sam", "specdec-run -m drafter=a sam", []),
        ("specdec-run --config-dir {conf} verifier=m", "specdec-run verifier=m", ["--config-dir", "{conf}"]),
        ("specdec-run -cd {conf} a=1 ", "specdec-run a=1 ", ["-cd", "{conf}"]),
        ("specdec-run --config-dir nowhere verifier=m", "specdec-run verifier=m", []),
        ("specdec-run a=1 --config-dir co", "specdec-run a=1 -", []),
        ("specdec-run --conf", "specdec-run -", []),
        ("specdec-replay outputs/run base", "specdec-replay base", []),
    ],
)
def test_what_hydra_can_complete_of_a_line(line: str, overrides: str, flags: list[str], tmp_path: Path) -> None:
    found = completable(line.format(conf=tmp_path))
    assert found == (overrides, [word.format(conf=tmp_path) for word in flags])
