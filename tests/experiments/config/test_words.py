"""Words of the command line: overrides, flags, folders, ``~``; and the line that a shell wants completed."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.config.words import completable, with_folders, with_home, without_nulls


@pytest.mark.parametrize(
    ("line", "overrides", "flags"),
    [
        ("specdec-run drafter=ngram ", "specdec-run drafter=ngram ", []),
        ("specdec-run drafter=a -m sam", "specdec-run -m drafter=a sam", []),
        ("specdec-run --config-dir {conf} verifier=m", "specdec-run verifier=m", ["--config-dir", "{conf}"]),
        ("specdec-run --config-dir nowhere verifier=m", "specdec-run verifier=m", []),
        ("specdec-run a=1 --config-dir co", "specdec-run a=1 -", []),
        ("specdec-replay outputs/run base", "specdec-replay base", []),
    ],
)
def test_what_hydra_can_complete_of_a_line(line: str, overrides: str, flags: list[str], tmp_path: Path) -> None:
    found = completable(line.format(conf=tmp_path))
    assert found == (overrides, [word.format(conf=tmp_path) for word in flags])


def test_folders_become_a_setting_and_the_rest_stays() -> None:
    words = ["a", "out=x.html", "--config-dir", "mine", "b"]
    assert with_folders(words, "runs") == ["runs=['a','b']", "out=x.html", "--config-dir", "mine"]
    assert with_folders(["a", "prompt=3"], "run", several=False) == ["run='a'", "prompt=3"]
    assert with_folders(["out=x"], "runs") == ["out=x"]
    with pytest.raises(ValueError, match="give one folder, not 2: a b"):
        with_folders(["a", "b"], "run", several=False)


@pytest.mark.parametrize("name", ["a b,c", "it's", "[x]", "a:b", "ü{}", "outputs/*/0"])
def test_hydra_reads_the_very_name_of_a_folder(name: str) -> None:
    (word,) = with_folders([name], "run", several=False)
    assert OverridesParser.create().parse_override(word).value() == name


def test_a_folder_whose_name_has_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("drafter=model").mkdir()
    assert with_folders(["drafter=model", "round=2"], "run", several=False) == ["run='drafter=model'", "round=2"]


def test_null_stands_for_none_only_where_a_group_is_chosen() -> None:
    given = ["-m", "drafter=null,ngram", "experiment=null", "seed=null", "drafter.shape=null", "+a=null", "x"]
    assert without_nulls(given) == ["-m", "drafter=none,ngram", *given[2:]]


def test_the_home_is_found_wherever_a_path_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = ["target.name=~/m", "runs=[~/a,~/b]", "dataset.files=~/a,~/b", "~methods.model", "a=b~/c", "~/bare"]
    assert with_home(given) == [
        *("target.name=/home/me/m", "runs=[/home/me/a,/home/me/b]", "dataset.files=/home/me/a,/home/me/b"),
        *("~methods.model", "a=b~/c", "~/bare"),
    ]
