"""The memory of a run from its configuration: what is planned agrees with what the components then are."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from drafters.peagle import TrainedPEagle
from drafters.redrafter import TrainedRecurrent
from drafters.uno import TrainedUno
from experiments.config.checking import in_words
from experiments.config.sections import build
from experiments.config.settings import EngineSettings
from experiments.measuring.meters import held_by
from experiments.planning.memory import RunMemory
from experiments.session.memory import plan_memory
from specdec import Engine, Target
from specdec.cache.formats import FORMATS
from specdec.physics.capacity import Drafting, Served
from specdec.physics.precision import Precision
from specdec.physics.shape import nominal
from tests.experiments.runs import Configure
from tests.gemma4 import assistant, gemma
from tests.public_models import ROUND_8B


@pytest.mark.parametrize(
    "words",
    [
        ["drafter=model", "tree=expansion"],
        ["drafter=eagle", "tree=sampled"],
        ["drafter=block", "drafter.shape=3"],
        ["drafter=choice"],
    ],
    ids=" ".join,
)
def test_nodes_of_drafts_are_those_of_the_drafter(words: list[str], configure: Configure) -> None:
    config = configure("run", *words, "method=m")
    planned = plan_memory(config, {"m": "drafter"})
    assert isinstance(planned, RunMemory)
    served, drafter = planned.methods["m"], build(config, "drafter")
    assert served.drafted == drafter.max_nodes
    assert not planned.unknown


@pytest.mark.parametrize(
    ("drafter", "rows", "recording"),
    [
        ("eagle", 3, "auto"),
        ("quantized drafter.quantization=int4", 3, "auto"),
        ("model", 3, "auto"),
        pytest.param("block", 3, "auto", marks=pytest.mark.full),
        ("skip drafter.skip=[4,2.mlp,1.self_attn,0-1]", 3, "auto"),  # its weights are the target's
        ("skip drafter.skip=[4-5]", 3, "auto"),  # and so is its cache
        ("staged", 3, "auto"),
        ("hydra drafter.name=bundled/hydra", 3, "auto"),
        ("redrafter drafter.name=HEADS/redrafter", 3, "auto"),
        ("peagle drafter.name=HEADS/peagle", 3, "auto"),
        ("uno drafter.name=HEADS/uno", 3, "auto"),
        ("eagle", 4, "rounds"),
        ("eagle", 5, "rounds"),  # are padded with rows of no request, which have a slot
    ],
)
def test_a_drafter_holds_what_is_planned(
    drafter: str, rows: int, recording: str, configure: Configure, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights but for norms and small vectors, and caches to the byte."""
    size = {"max_batch_size": rows, "max_length": 50, "recording": recording}
    words = [f"engine.{name}={value}" for name, value in size.items()]
    config = configure("run", *f"drafter={drafter}".replace("HEADS", str(heads)).split(), "method=m", *words)
    planned = plan_memory(config, {"m": "drafter"})
    assert isinstance(planned, RunMemory)
    target, rule, made = (build(config, section) for section in ("target", "verifier", "drafter"))
    with Engine(target, made, rule, **size) as engine:
        held = held_by([engine])
    assert as_held(planned, held) and not planned.unknown
    unaware = replace(planned, padded=frozenset()).planned  # a mutant
    assert (unaware == planned.planned) == (rows < 5)
    if drafter.split()[0] in ("quantized", "model", "skip", "hydra", "redrafter", "uno") and "4-5" not in drafter:
        monkeypatch.setattr(type(made), "runs", "nothing")  # another: it counts nothing
        silent = plan_memory(config, {"m": "drafter"})
        assert isinstance(silent, RunMemory) and not as_held(silent, held)


def as_held(planned: RunMemory, held: Any) -> bool:
    """Whether the plan is what engines hold."""
    memory = planned.planned
    caches = (memory.kv, memory.drafter_kv, memory.scratch) == (held.kv, held.drafter_kv, held.scratch)
    return (
        caches
        and memory.weights == pytest.approx(held.weights, rel=0.005)
        and memory.drafter == pytest.approx(held.drafter, rel=0.01)
    )


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New heads for the bundled target, as a training writes them."""
    folder = tmp_path_factory.mktemp("heads")
    target = Target.from_pretrained("bundled/target", dtype="float32")
    for name, head in {"redrafter": TrainedRecurrent(), "peagle": TrainedPEagle(layers=2), "uno": TrainedUno()}.items():
        head.begin(target, None)
        head.save(folder / name, {})
    return folder


def test_an_assistant_holds_what_is_planned_which_is_no_cache(configure: Configure, tmp_path: Path) -> None:
    target = gemma(shared=2)
    target.model.save_pretrained(tmp_path / "target")
    assistant().save_pretrained(tmp_path / "assistant")
    words = ["target=hf", f"target.name={tmp_path / 'target'}", "drafter=assistant", "target.dtype=float32"]
    size = {"max_batch_size": 3, "max_length": 50}
    words += [f"drafter.name={tmp_path / 'assistant'}", "method=m", *(f"engine.{key}={size[key]}" for key in size)]
    config = configure("run", *words)
    planned = plan_memory(config, {"m": "drafter"})
    assert isinstance(planned, RunMemory)
    with Engine(target, build(config, "drafter"), build(config, "verifier"), **size) as engine:
        held = held_by([engine])
    assert held.drafter > 0 == held.drafter_kv and planned.planned.drafter_kv == 0 and not planned.unknown
    assert planned.planned.drafter == pytest.approx(held.drafter, rel=0.01)


def test_pages_are_the_requests_alone(configure: Configure) -> None:
    planned = plan_memory(
        configure("run", "drafter=none", "method=m", "engine=paged", "engine.recording=rounds"), {"m": None}
    )
    assert isinstance(planned, RunMemory) and not planned.padded


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["target.device_map=auto"], "memory is not planned with target.device_map: the model is on several devices"),
        (["target.name=/nowhere"], "memory is not planned: "),
    ],
)
def test_why_nothing_is_planned(words: list[str], said: str, configure: Configure) -> None:
    """Loading says what is wrong, if anything is."""
    found = plan_memory(configure("run", "drafter=none", "method=m", *words), {"m": "drafter"})
    assert isinstance(found, str) and found.startswith(said)


def test_the_settings_know_all_formats() -> None:
    """They have the names without importing PyTorch."""
    (kind,) = (field.type for field in fields(EngineSettings) if field.name == "kv_cache")
    assert in_words(kind) == f"one of {', '.join(FORMATS)}, or null"


KV = 131_072
SMALL = nominal(1_000_000_000, layers=32, heads=32, kv_heads=8)
ALONE = Served(shape=ROUND_8B, precision=Precision(), activations=2e9)
HELPER = Drafting(shape=SMALL, precision=Precision(), shown=3)
DRAFTING = replace(ALONE, drafting=(HELPER,), drafted=4, activations=1e9)
RUN = RunMemory(target="m", methods={"a": DRAFTING}, rows=2, length=1000, free=40e9, place="cpu (a chip)")


def test_engines_share_the_target_and_nothing_else() -> None:
    memory = replace(RUN, methods={"a": DRAFTING, "b": ALONE}).planned
    assert (memory.weights, memory.drafter) == (16e9, 2e9), "the target once"
    assert memory.kv == 2 * 2 * 1000 * KV, "a cache in each"
    assert memory.drafter_kv == 2 * 1000 * KV
    assert memory.scratch == 2 * (4 + 3) * KV, "four nodes in the target's cache, three in the drafter's"
    assert memory.activations == 2e9, "they take turns"


def test_targets_of_other_weights_count_each() -> None:
    several = replace(RUN, methods={"a": DRAFTING, "b": ALONE, "c": ALONE}, weights_of={"a": "x", "b": "y", "c": "x"})
    assert several.planned.weights == 2 * 16e9
    wide = replace(several, own_rows={"c": 5})
    assert wide.planned.kv == (2 + 2 + 5) * 1000 * KV


def test_a_refusal_says_what_would_fit() -> None:
    asked = replace(RUN, rows=64, length=4096)
    assert asked.planned.total > asked.free
    rows, length = asked.most_rows(asked.free, length=4096), asked.longest(asked.free, rows=64)
    said = (
        rf"^this run needs 8\d\.\d\d GiB \(weights 14\.90 GiB, drafter 1\.86 GiB, KV cache 6\d\.\d\d GiB, activations "
        rf"954 MiB\), and cpu \(a chip\) has 37\.25 GiB free: give at most engine\.max_batch_size={rows} with "
        rf"engine\.max_length=4096 or engine\.max_length={length} with engine\.max_batch_size=64$"
    )
    with pytest.raises(ValueError, match=said):
        asked.check()
    for fits in (replace(asked, rows=rows), replace(asked, length=length)):
        fits.check()
    for too_much in (replace(asked, rows=rows + 1), replace(asked, length=length + 1)):
        with pytest.raises(ValueError, match="this run needs"):
            too_much.check()


@pytest.mark.parametrize(
    ("free", "said"),
    [(10e9, r"target\.quantization=int8 or int4, or a"), (5e9, r"target\.quantization=int4, or a"), (1e9, "a")],
)
def test_weights_that_do_not_fit(free: float, said: str) -> None:
    with pytest.raises(ValueError, match=rf"its weights alone do not fit; give {said} smaller target$"):
        replace(RUN, free=free).check()
