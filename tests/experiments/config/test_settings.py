"""Settings are checked by their annotations, and paths may begin with ``~``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from experiments.config.checking import Wanted, check_arguments
from experiments.config.sections import build, check_settings
from experiments.config.settings import Count, OneOrMore
from tests.models import tiny_model


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
        ({"sizes": []}, "sizes=[]: give an integer of at least 1, or a list of them"),
        ({"sizes": [1, 0]}, "sizes=[1, 0]: give an integer of at least 1, or a list of them"),
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


def test_paths_of_a_file_may_begin_with_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Paths:
        one: dict
        several: list[str]
        other: str

    monkeypatch.setenv("HOME", "/home/me")
    config = OmegaConf.create({"one": {"name": "~/m"}, "several": ["~/a", "b"], "other": "a~/b"})
    check_settings(config, Paths)
    assert config == {"one": {"name": "/home/me/m"}, "several": ["/home/me/a", "b"], "other": "a~/b"}


def test_a_target_may_borrow_a_tokenizer(configure: Callable[..., DictConfig], saved: Path, tmp_path: Path) -> None:
    tiny_model(vocab_size=257).save_pretrained(tmp_path / "bare")
    named = f"target.name={tmp_path / 'bare'}"
    with pytest.raises(InstantiationException, match="takes another one as tokenizer=FOLDER"):
        build(configure("run", named), "target")
    target = build(configure("run", named, f"target.tokenizer={saved / 'target'}"), "target")
    assert target.tokenizer is not None and target.name == str(tmp_path / "bare")
