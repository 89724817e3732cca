"""Words of the command line, the options of a group, and settings, which are checked by their annotations."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.config.kinds import Count, OneOrMore, Wanted, check_arguments
from experiments.config.launch import with_folders, with_home
from experiments.config.sections import CONF, build, option_names, sections
from tests.experiments.runs import Configure
from tests.models import tiny_model


def test_hydra_reads_the_very_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("drafter=model").mkdir()
    for name in ("a b,c", "it's", "[x]", "a:b", "ü{}", "outputs/*/0", "drafter=model"):
        (word,) = with_folders([name], "run", several=False)
        assert OverridesParser.create().parse_override(word).value() == name


def test_the_home_is_found_wherever_a_path_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = ["target.name=~/m", "runs=[~/a,~/b]", "dataset.files=~/a,~/b", "~methods.model", "a=b~/c", "~/bare"]
    assert with_home(given) == [
        *("target.name=/home/me/m", "runs=[/home/me/a,/home/me/b]", "dataset.files=/home/me/a,/home/me/b"),
        *("~methods.model", "a=b~/c", "~/bare"),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's configuration with a rule that is new and one that takes the place of the package's."""
    conf = tmp_path / "my conf"  # with a space, as folders have
    (conf / "verifier").mkdir(parents=True)
    (conf / "verifier" / "mine.yaml").write_text("_target_: verifiers.LenientVerifier\nlenience: 0.25\n")
    (conf / "verifier" / "empty.yaml").write_text("lenience: 0.25\n")
    return conf


@pytest.fixture
def searching(folder: Path) -> Iterator[str]:
    """A job that was started with a folder in ``hydra.searchpath``."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("run", [f"hydra.searchpath=['file://{folder}']"], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        yield "verifier"
    HydraConfig.instance().cfg = None


def test_the_search_path_of_the_job_counts_and_a_class_needs_no_file(searching: str) -> None:
    assert {"mine", "block"} <= set(option_names(searching))
    own = {"_target_": "verifiers.LenientVerifier", "lenience": 0.75}
    found = sections(searching, ["block", "mine", {"name": "mine", "lenience": 0.5}, own])
    assert list(found) == ["block", "mine", "mine, lenience=0.5", "LenientVerifier, lenience=0.75"]
    assert [section.get("lenience") for section in found.values()] == [None, 0.25, 0.5, 0.75]
    HydraConfig.instance().cfg = None
    assert "mine" not in option_names("verifier"), "and is forgotten"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Count


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    sizes: OneOrMore[Count] = 1
    mode: Literal["a", "b"] | None = None
    even: Annotated[int, Wanted("an even number", lambda value: value % 2 == 0)] = 0
    flag: bool = True


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"inner": {"size": 0}}, "inner.size=0: give an integer of at least 1"),
        ({"inner": {"size": True}}, "inner.size=True: give an integer of at least 1"),
        ({"inner": {"sise": 1}}, "there is no inner.sise: did you mean inner.size?"),
        ({"inner": {}}, "inner.size is missing"),
        ({"inner": 3}, "inner=3: give a section"),
        ({"sizes": [1, 0]}, "sizes=[1, 0]: give an integer of at least 1, or a list"),
        ({"mode": "c"}, "mode='c': give one of a, b, or null"),
        ({"even": 3}, "even=3: give an even number"),
        ({"flag": 1}, "flag=1: give true or false"),
        ({"flg": True}, "there is no flg: did you mean flag?"),
    ],
)
def test_a_wrong_setting_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        check_arguments(Outer, {"inner": {"size": 1}} | options)
    assert sentence in str(raised.value)


class Options(TypedDict, total=False):
    size: int


class Made:
    """Made by a class method, which passes options on to the constructor."""

    def __init__(self, **options: Unpack[Options]):
        self.options = options

    @classmethod
    def load(cls, name: str, **options: Unpack[Options]) -> "Made":
        return cls(**options)


class Wider(Made):
    def __init__(self, *, weight: float = 0.5, **options: Unpack[Options]):
        super().__init__(**options)


def test_what_a_subclass_adds_can_be_given_to_the_class_method_that_makes_it() -> None:
    check_arguments(Wider.load, {"name": "a", "size": 2, "weight": 0.3})
    for made, options in ((Made, {"weight": 0.3}), (Wider, {"weight": "a"}), (Wider, {"wight": 0.3})):
        with pytest.raises(ValueError, match=r"weight='a': give a number|there is no (weight|wight)"):
            check_arguments(made.load, {"name": "a", **options})


def test_a_target_may_borrow_a_tokenizer(configure: Configure, saved: Path, tmp_path: Path) -> None:
    tiny_model(vocab_size=257).save_pretrained(tmp_path / "bare")
    named = f"target.name={tmp_path / 'bare'}"
    assert build(configure("run", named), "target").tokenizer is None
    target = build(configure("run", named, f"target.tokenizer={saved / 'target'}"), "target")
    assert target.tokenizer is not None and target.name == str(tmp_path / "bare")
