"""The command that inspects a drafter: its tables, its verdict, and what it says about bad input."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from drafters.heads.eagle_files import save_eagle
from drafters.heads.mtp_files import save_mtp
from experiments.inspect_drafter import inspect_drafter as inspect
from experiments.inspecting.kinds import Mistake
from tests.experiments.inspecting.toys import Seen, toy_block, toy_eagle3, toy_medusa, toy_model, toy_mtp, toy_tokenizer

Configure = Callable[..., DictConfig]
PROMPTS = ",".join(" ".join(f"w{7 * row + 5 * place * row % 63}" for place in range(9)) for row in range(1, 9))
SMALL = (
    *("tokens=32", "threads=1", "target=hf", "target.dtype=float32", "target.device=cpu"),
    f"prompts=[{PROMPTS}]",
)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the toy target and heads of it."""
    folder, seen = tmp_path_factory.mktemp("toys"), Seen(toy_model())
    seen.model.save_pretrained(folder / "target")
    toy_tokenizer().save_pretrained(folder / "target")
    save_eagle(toy_eagle3(seen), folder / "eagle", notes={"target": "someone/target"})
    save_mtp(toy_mtp(seen), folder / "mtp", notes={"target": "another/model"})
    toy_block(seen).save_pretrained(folder / "block")
    toy_medusa(seen).save_pretrained(folder / "medusa")
    return folder


@pytest.fixture
def composed(configure: Configure, toys: Path) -> Configure:
    """Composes an inspection of one of the toys."""

    def compose(kind: str, *overrides: str) -> DictConfig:
        names = [f"target.name={toys / 'target'}", f"drafter.name={toys / kind}"]
        return configure("inspect_drafter", f"drafter={kind}", *SMALL, *names, *overrides)

    return compose


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_right_head(composed: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(composed("eagle", "depths=1"))
    text = shown(capsys)
    assert found.mistake is None and not found.knows_nothing
    for words in (
        "kind EAGLE-3 head, 1 decoder layer, ",
        "layout EAGLE-3's (midlayer.*), with this project's specdec.json",
        "trained on someone/target, as its files say",
        "reads hidden states 2, 4, 5 (l is the input of layer l) of a target of 8 layers",
        "vocabulary 64 of the target's 64 tokens",
        "RoPE theta 50, default (as the target's)",
        f"No mistake was found: none of {len(found.tried)} alternatives raises the acceptance.",
    ):
        assert words in text
    assert f"1 {found.loaded.acceptance[0]:.2f} {found.loaded.unconditional[0]:.2f} 0.53 to 0.81" in text


def test_a_mistake_and_what_mends_it(composed: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """What the verdict says to set is set, and then nothing is wrong."""
    found = inspect(composed("eagle", "depths=1", "drafter.hidden_layers=[1,3,4]"))
    text = shown(capsys)
    assert found.mistake is not None and found.mistake.alternative.mistake is Mistake.LAYERS
    assert "was probably loaded with a mistake: wrong hidden layers. With " in text
    assert "To mend it: leave out drafter.hidden_layers." in text
    mended = inspect(composed("eagle", "depths=1"))
    assert mended.mistake is None
    assert mended.loaded.length == pytest.approx(found.mistake.acceptance.length)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mtp", ["Its files say that it was trained on another/model", "joins the embedding before the hidden state"]),
        ("block", ["block 4 places, 3 tokens: every place predicts its own token", "Markov head (vanilla, rank 48)"]),
        ("medusa", ["heads 2, of 1 residual layers each", "layout FasterDecoding's, first version"]),
    ],
)
def test_other_kinds(composed: Configure, kind: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(composed(kind))
    text = shown(capsys)
    assert found.mistake is None and all(each in text for each in words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["drafter=none"], r"^drafter=none drafts nothing, so there is nothing to inspect"),
    ],
)
def test_bad_settings(configure: Configure, overrides: list[str], words: str) -> None:
    """All of them before a target is loaded: there is none."""
    with pytest.raises(ValueError, match=words):
        inspect(configure("inspect_drafter", "target.name=/nowhere/else", *overrides))


def test_a_drafter_without_a_head(configure: Configure, toys: Path) -> None:
    with pytest.raises(ValueError, match=r"^NGramDrafter is not one trained model, so there is nothing to inspect: "):
        inspect(configure("inspect_drafter", *SMALL, f"target.name={toys / 'target'}", "drafter=ngram"))
