"""Every kind of trained drafter in every format drafts as before; formats that there are not are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from drafters import BlockDrafter, EagleDrafter, MedusaDrafter, ModelDrafter, MTPDrafter, PARDDrafter, PEagleDrafter
from drafters.heads.eagle_files import load_eagle
from drafters.heads.mtp import embedding_first
from experiments.exporting.kinds import KINDS, Source, kind_of, read
from experiments.exporting.writing import compare
from specdec import Drafter, Engine, SamplingParams, Target
from specdec.checks import playing
from tests.components import medusa_heads
from tests.experiments.exporting.conftest import Export
from verifiers import RejectionVerifier

DRAFTERS: dict[str, Callable[[Path], Drafter]] = {
    "medusa": lambda folder: MedusaDrafter.from_pretrained(folder, shape=2, optimize=False),
    "eagle": lambda folder: EagleDrafter.from_pretrained(folder, shape=[2, 2], optimize=False),
    "eagle3": lambda folder: EagleDrafter.from_pretrained(folder, shape=[2, 2], optimize=False),
    "peagle": lambda folder: PEagleDrafter.from_pretrained(folder, optimize=False),
    "pard": lambda folder: PARDDrafter.from_pretrained(str(folder), optimize=False),
    "mtp": lambda folder: MTPDrafter.from_pretrained(folder, shape=2, optimize=False),
    "dflash": lambda folder: BlockDrafter.from_pretrained(folder, optimize=False),
    "dspark": lambda folder: BlockDrafter.from_pretrained(folder, shape=[2, 1], optimize=False),
    "lm": lambda folder: ModelDrafter.from_pretrained(str(folder), shape=2, optimize=False),
}


def drafts(drafter: Drafter, target: Target) -> list[playing.Run]:
    with Engine(target, drafter, RejectionVerifier(), max_length=48, optimize=False) as engine:
        sampling = SamplingParams(max_new_tokens=6, temperature=1.0, seed=5, stream=0)
        return playing.run(engine, [playing.Job((3, 1, 4, 1, 5, 9, 2, 6), sampling)])


ALWAYS = {("eagle3", "speculators"), ("mtp", KINDS["mtp"].formats[-1]), ("dspark", KINDS["dspark"].formats[-1])}
CASES = [
    pytest.param(kind, form, marks=() if (kind, form) in ALWAYS else pytest.mark.full)
    for kind, known in KINDS.items()
    for form in known.formats
]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_what_is_exported_drafts_as_before(
    kind: str, form: str, written: Callable[[str], Path], exported: Export, target: Target
) -> None:
    """Weights, options and sampled drafts are those of the folder that was read."""
    folder = written(kind)
    out = exported(folder, form)
    decoder = target.model.config
    sources = [read(Source(name=str(each)), kind_of(str(each)), decoder) for each in (folder, out)]
    assert sources[0].kind == sources[1].kind == kind
    if (kind, form) == ("mtp", "speculators"):  # which has the embedding first
        sources[0] = replace(sources[0], module=embedding_first(sources[0].module))  # type: ignore[arg-type]
    compare(sources[0], sources[1])
    before, after = (drafts(DRAFTERS[kind](each), target) for each in (folder, out))
    assert before[0].tokens == after[0].tokens
    assert any(len(draft.nodes) > 1 for draft in before[0].drafts)
    for one, other in zip(before[0].drafts, after[0].drafts, strict=True):
        assert one.difference(other, 1e-5) is None
    told = json.loads((out / "specdec.json").read_text())
    assert (told["target"], told["seed"], told["format"]) == (target.name, 3, form)
    assert told["target_revision"].startswith("files:")


def test_medusa_heads_are_known_in_other_layouts(target: Target, tmp_path: Path) -> None:
    medusa_heads(target.model).save_pretrained(tmp_path, layout="vllm")
    assert kind_of(str(tmp_path)) == "medusa"


def test_a_difference_would_be_found(written: Callable[[str], Path]) -> None:
    """The comparison above, of a head with one whose layers, norm or weights are others."""
    head = load_eagle(written("eagle3"))
    found = read(Source(name=str(written("eagle3"))), "eagle3")
    compare(found, found)
    for name, value in {"hidden_layers": (0, 2, 3), "feeds_normed": True}.items():
        other = load_eagle(written("eagle3"))
        setattr(other, name, value)
        with pytest.raises(RuntimeError, match=f"not what was read back: {name}"):
            compare(found, type(found)(found.kind, other))
    next(head.parameters()).data[0] += 1
    with pytest.raises(RuntimeError, match="not what was read back: model"):
        compare(found, type(found)(found.kind, head))


@pytest.mark.parametrize("kind", ["lm", "mtp"])
def test_formats_that_there_are_not_are_refused(kind: str, written: Callable[[str], Path], exported: Export) -> None:
    folder, forms = written(kind), KINDS[kind].formats
    for form in {"native", "speculators", "sglang"} - set(forms):
        with pytest.raises(ValueError, match=rf"^format={form}: .*; give format={' or format='.join(forms)}$"):
            exported(folder, form)
