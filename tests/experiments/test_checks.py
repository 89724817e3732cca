"""Verdicts on decoders, rules and drafters: right ones pass, and a mistake is an error; and on trained heads."""

import importlib
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from drafters import BlockDrafter, EagleDrafter, MedusaDrafter, ModelDrafter, MTPDrafter
from drafters.heads.eagle import EagleHead
from experiments.audit import audit
from experiments.check import check
from experiments.inspecting.acceptance import prompts_of
from experiments.inspecting.mistakes import Inspection, Mistake, alternatives, inspect
from experiments.measuring.exactness import LAWS, SHAPES, cases
from specdec import SamplingParams, Target, bundled
from specdec.checks.drafts import enumerate_drafts, num_drafts
from specdec.checks.mistakes import MISTAKES
from specdec.checks.playing import Status
from specdec.checks.tables import Tables
from tests import mutants
from tests.changed_rule import ChangedRule, accept_the_first, emit_p
from tests.components import wide
from tests.drafters.test_mtp import head_of
from tests.experiments.contenders.test_openai import URL, Server
from tests.experiments.runs import Configure, Stop
from tests.models import tiny_model
from verifiers import RejectionVerifier, SharedNoiseVerifier, TransportVerifier

SMALL = ("vocab=2", "tables=1", "temperatures=[1]")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_verdict_on_a_rule(configure: Configure, capsys: Any) -> None:
    for words, verdict, says in (
        ("traversal", "is exact, over", "exact."),
        ("lenient", "is not exact", "lossy."),
        ("cascade verifier.alpha=0.3", "is exact with respect to the distr", "exact with respect to another"),
        ("shared_noise streams=500", "is exact by its own check", "exact, noise shared."),
    ):
        done = check(configure("check", *f"verifier={words}".split(), *SMALL))
        text = shown(capsys)
        assert f"Verifier {verdict}" in text and f"It says of itself: {says}" in text
        chains_only = words == "lenient"
        assert {case.shape for case in done} == {"chain 3"} if chains_only else len({case.shape for case in done}) > 2
        if words == "traversal":
            assert all(case.accepted > case.rejection - 1e-12 for case in done), "no fewer than rejection sampling"


def test_drafts_are_counted_without_making_them_and_too_many_are_refused_at_once() -> None:
    for shape, law, vocab in itertools.product(SHAPES.values(), LAWS, (2, 3)):
        made = Tables.random(vocab, shape.max_depth, seed=0)
        assert num_drafts(shape, law, vocab) == len(enumerate_drafts(made, shape, law).probability)
    with pytest.raises(ValueError, match=r"^vocab=50: a tree of shape 2 x 2, drafted iid, has .* vocab=11 or less"):
        next(cases(TransportVerifier(), 50, 2, 0, [1]))


class AlwaysTheFirst(ChangedRule):
    def __init__(self) -> None:
        super().__init__(SharedNoiseVerifier(), stop=accept_the_first)


class NoResidual(ChangedRule):
    def __init__(self) -> None:
        super().__init__(RejectionVerifier(), after=emit_p)


def test_a_rule_that_promises_too_much(configure: Configure) -> None:
    for rule, words, message in (
        (NoResidual, [], "NoResidual says that it is exact and is not: total variation 0"),
        (AlwaysTheFirst, ["streams=500"], "says that its noise is shared, and [0-9]+ outputs are not those of plain"),
    ):
        with pytest.raises(ValueError, match=message):
            check(configure("check", f"verifier._target_={rule.__module__}.{rule.__name__}", *SMALL, *words))


def test_a_drafter_that_keeps_its_contract_and_one_that_does_not(configure, saved: Path, capsys: Any) -> None:
    words = [f"target.name={saved / 'target'}", "draws=0", "rounds=4", "tokens=8", "threads=1", "engine.max_length=160"]
    words.append("prompts=[abcabc, one two one two]")
    findings = check(configure("check", "drafter=ngram", *words))
    told = capsys.readouterr()
    text = " ".join(told.out.split())
    assert " s: recorded rounds\n" in told.err, "a line per check where there is no terminal"
    assert "NGramDrafter, tried with" in text and "greedy outputs passed equal to plain decoding" in text
    passed = sum(finding.status is Status.PASSED for finding in findings)
    assert f"NGramDrafter keeps its contract: it passes {passed} checks, and" in text

    words += ["drafter=none", f"drafter._target_={mutants.__name__}.Twins"]
    with pytest.raises(ValueError, match=r"^Twins breaks its contract in 1 check: trees: distinct siblings: node 2: "):
        check(configure("check", *words))
    assert "trees: distinct siblings FAILED" in shown(capsys)


def test_a_mistake_and_what_mends_it(configure: Configure, capsys: Any) -> None:
    """What the verdict says to set is set, and then nothing is wrong."""
    words = ["inspect=true", "drafter=eagle", "drafter.name=bundled/eagle3", "depths=1", "tokens=32", "threads=1"]
    words += ["target.dtype=float32", "target.device=cpu"]
    found = check(configure("check", *words, "drafter.hidden_layers=[5,3,1]"))
    text = shown(capsys)
    assert found.mistake is not None and found.mistake.alternative.mistake is Mistake.LAYERS
    assert "was probably loaded with a mistake: wrong hidden layers. With " in text
    assert "To mend it: leave out drafter.hidden_layers." in text
    mended = check(configure("check", *words))
    text = shown(capsys)
    assert mended.mistake is None and not mended.knows_nothing
    assert mended.loaded.length == pytest.approx(found.mistake.acceptance.length)
    assert "kind EAGLE-3 head, 1 decoder layer, " in text and "RoPE theta 10,000, default (as the target's)" in text
    assert f"No mistake was found: none of {len(mended.tried)} alternatives raises the acceptance." in text


@pytest.fixture(scope="module")
def bundled_target() -> Target:
    return Target.from_pretrained("bundled/target", dtype="float32")


def inspected(make: Any, target: Target, *, batches: int = 1, tokens: int = 40) -> Inspection:
    prompts = [prompt for seed in range(batches) for prompt in prompts_of(target, None, seed)]
    return inspect(make, target, prompts, tokens=tokens)


def loaded(kind: Any, name: str | Path, **options: Any) -> Any:
    return lambda settings: kind.from_pretrained(str(name), **{"shape": 2, "sampling": "iid", **options, **settings})


def eagle3(folder: Path, **config: Any) -> Any:
    shutil.copytree(bundled.resolve("bundled/eagle3"), folder, dirs_exist_ok=True)
    for name in ("config.json", "specdec.json"):
        kept = json.loads((folder / name).read_text()) | config
        (folder / name).write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    return loaded(EagleDrafter, folder)


RIGHT: dict[str, Any] = {
    "block head (DSpark)": loaded(BlockDrafter, "bundled/dspark"),
    "Medusa heads": loaded(MedusaDrafter, "bundled/medusa"),
    "model": loaded(ModelDrafter, "bundled/drafter"),
}


@pytest.mark.parametrize("kind", [pytest.param(n, marks=[] if n[0] == "M" else pytest.mark.full) for n in RIGHT])
def test_a_right_head_is_not_accused(kind: str, bundled_target: Target) -> None:
    found = inspected(RIGHT[kind], bundled_target)
    assert found.mistake is None and not found.knows_nothing and not found.refused
    assert found.loaded.acceptance[0] > found.loaded.unigram + 0.1
    assert found.drafter.kind == kind


THETA = {"rope_type": "default", "rope_theta": 2.0}
WRONG: dict[Mistake, tuple[Callable[[Path], Any], str]] = {
    Mistake.NORM: (lambda folder: eagle3(folder, norm_before_residual=False), "'norm_before_residual: true'"),
    Mistake.ROPE: (lambda folder: eagle3(folder, rope_theta=None, rope_parameters=THETA), "'rope_theta: 10000'"),
    Mistake.MASK_TOKEN: (lambda _: loaded(BlockDrafter, "bundled/dspark", mask_token_id=5), "mask_token_id=4095"),
}
"""How a mistake is made, and what mends it."""


@pytest.mark.full
@pytest.mark.parametrize("kind", WRONG)
def test_a_mistake_is_named(kind: Mistake, bundled_target: Target, tmp_path: Path) -> None:
    plant, remedy = WRONG[kind]
    found = inspected(plant(tmp_path), bundled_target, batches=2)
    assert found.mistake is not None, [(each.alternative.name, each.gain) for each in found.tried]
    assert found.mistake.alternative.mistake == kind and remedy in found.mistake.alternative.remedy
    assert found.mistake.gain.tokens > 0.1


def test_an_mtp_module_is_tried_with_the_other_state() -> None:
    small = Target(tiny_model("llama", vocab_size=64))
    module: Any = head_of(small.model)
    for before, state in ((True, "after_norm"), (False, "before_norm")):
        module.before_norm = before
        tried = alternatives(MTPDrafter(module, 2).describe(small), small)
        assert [each.mistake for each in tried if each.settings == {"hidden_state": state}] == [Mistake.NORM]


def test_an_untrained_head(bundled_target: Target) -> None:
    head = wide(EagleHead.for_target(bundled_target.model), 1.0)
    assert inspected(lambda settings: EagleDrafter(head, 2), bundled_target, tokens=16).knows_nothing


HERE = "tests.experiments.test_checks"
EXAMPLES = Path(__file__).parents[2] / "examples"
subjects: dict[str, Any] = {}


@pytest.fixture
def audited(configure: Configure, saved: Path, tmp_path: Path) -> Callable[..., Any]:
    words = [f"target.name={saved / 'target'}", f"drafter.name={saved / 'drafter'}", f"assistant={saved / 'drafter'}"]
    words += ["dataset.count=3", "context=4", "threads=1", f"out={tmp_path / 'out'}", "sampling.temperature=0.3"]
    words += ["mistakes=[one_hot,residual_from_p]", "max_samples=4096", "sampling.ignore_eos=true"]
    return lambda *more: audit(configure("audit", *words, *more))


def nonsense(ids: list[int], sampling: SamplingParams, n: int) -> Any:
    return subjects["answers"](n, ids, sampling)


def test_our_engine_is_lossless(audited: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    found = audited()
    said = " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert "shows no sign of a mistake" in said and "at most 736 outputs of 3 tokens" in said
    assert written["verdict"] == found["verdict"] == "no sign of a mistake"
    assert found["outputs"] == found["planned"] and found["p_value"] > 1e-3 and found["tokens"] == 3 * found["outputs"]
    assert all(each["power"] >= 0.99 for each in found["power"] if each["distance"] >= 0.02)
    with pytest.raises(ValueError, match="holds the results of another audit"):
        audited()


@pytest.mark.full
def test_every_mistake_is_found_within_2000_tokens_of_the_bundled_pair(configure: Configure, tmp_path: Path) -> None:
    found = audit(configure("audit", "drafter.shape=4", "drafted=4", f"out={tmp_path / 'out'}"))
    unasked = {"top_k_ignored", "min_p_ignored", "penalty_ignored", "own_top_p"}
    assert found["verdict"] == "no sign of a mistake"
    assert {each["mistake"] for each in found["power"]} == {*MISTAKES} - unasked
    for each in found["power"]:
        assert each["distance"] >= 0.02 and each["power"] >= 0.99
        assert each["samples"] * 6 <= 2_000, "so many tokens an output has"


def test_an_interrupted_audit_goes_on(audited: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    few = "max_samples=256"
    whole = audited(few, f"out={tmp_path / 'whole'}")
    Stop(monkeypatch, KeyboardInterrupt(), {3})
    with pytest.raises(ValueError, match=r"no verdict yet, .* after 64 outputs .* resume=true goes on \(interrupted\)"):
        audited(few)
    samples = tmp_path / "out" / "samples.jsonl"
    samples.write_text(samples.read_text() + '{"prompt": 0, "outp')  # it was killed while it wrote
    Stop(monkeypatch, ConnectionError("it went away"), {2})
    with pytest.raises(ValueError, match=r"ConnectionError: it went away"):
        audited(few, "resume=true")
    kept = samples.read_bytes()
    samples.write_bytes(kept.replace(b'"ids": [', b'"ids": [1, '))
    with pytest.raises(ValueError, match="outputs of other prompts than are planned now"):
        audited(few, "resume=true")
    samples.write_bytes(kept)
    found = audited(few, "resume=true")
    assert found["bets"] == whole["bets"] and found["outputs"] == whole["outputs"]


def test_nonsense_and_what_cannot_be_audited_is_one_sentence(audited, saved: Path, tmp_path: Path, monkeypatch) -> None:
    nonsense = f"function={HERE}.nonsense"
    for number, (answers, words, said) in enumerate(
        [
            (None, nonsense, "nonsense returned NoneType where 32 outputs were asked for: return a list of n lists"),
            ([1, 2, 3], nonsense, "one and the same output 32 times, .* it ignores the temperature, or the seed"),
            ([1, 2, 9_999], nonsense, "returned token 9999, and the target has 257 tokens"),
            (None, f"{nonsense} +contender=hf_generate", "several subjects"),
            (None, f"assistant={saved}/other", "has 757 tokens, and .* has 257"),
            (None, "sampling.temperature=0", "a run compares greedy outputs with plain decoding's"),
            (None, "sampling.adapter=a", "adapter=a: the law of sampled outputs is computed without"),
        ]
    ):
        monkeypatch.setitem(subjects, "answers", lambda n, *_, each=answers: each and [each] * n)
        with pytest.raises(ValueError, match=said):
            audited(*words.split(), f"out={tmp_path / str(number)}")
    assert not [*tmp_path.glob("*/audit.json")]


def test_a_server_with_a_filter_of_its_own_is_told(audited, target: Target, tmp_path: Path, monkeypatch) -> None:
    server = Server(target, monkeypatch)
    words = ["+contender=openai", f"contenders.openai.base_url={URL}", "engine.max_batch_size=4", "block=8"]
    words.append("+contenders.openai.extra={return_token_ids:true}")
    found = audited(*words, "max_samples=96")
    assert found["verdict"] == "no sign of a mistake" and found["outputs"] == found["planned"]
    server.ignores = {"top_p"}
    words += ["mistakes=[one_hot,top_p_ignored,own_min_p,own_penalty]", f"out={tmp_path / 'mistaken'}"]
    with pytest.raises(ValueError, match="it looks most like top_p_ignored: the request's top-p is not used"):
        audited(*words, "max_samples=512")


def test_another_tokenizer_is_told_from_a_mistake(audited: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setitem(subjects, "answers", lambda n, *_: torch.randint(1, 256, (n, 3)).tolist())
    with pytest.raises(ValueError, match=r"is not lossless: .* of these outputs cannot come from the target: does the"):
        audited(f"function={HERE}.nonsense")


@pytest.mark.parametrize("patched", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_mistake_that_shipped_in_transformers_is_found(patched: bool, configure, tmp_path: Path, monkeypatch) -> None:
    """Gemma-4's assistants draft the most probable token and hand over the logits as q."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("audit_transformers")
    torch.manual_seed(0)
    words = [*example.gemma4(tmp_path / "made"), *example.AUDIT, f"target.name={tmp_path / 'made'}", "context=4"]
    words += [f"assistant={tmp_path / 'made' / 'similar'}", "dataset.count=3", f"out={tmp_path / 'out'}"]
    if patched:
        drafts = SinglePositionMultiTokenCandidateGenerator
        monkeypatch.setattr(drafts, "get_candidates", example.patched(drafts.get_candidates))
        assert audit(configure("audit", *words, "max_samples=768"))["verdict"] == "no sign of a mistake"
        return
    with pytest.raises(ValueError, match=r"is not lossless: .* it looks most like one_hot"):
        audit(configure("audit", *words))
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert found["tokens"] <= 2_000 and found["log10_e"] > 3.3 and found["verdict"] == "not lossless"


EXACT = """
def evaluate_posterior(logits, candidates, processors):
    law = softmax(processors(None, logits[0, 0][None])[0], 0)
    drawn = torch.multinomial(law, 1)
    row = int((candidates[:, 1] == drawn).int().argmax())
    if candidates[row, 1] != drawn:
        return 0, 0, F.one_hot(drawn[0], len(law)).float()
    return row, 1, softmax(processors(None, logits[row, 1][None])[0], 0)
"""
"""Draws from p, and takes a draft that is equal."""
REDRAWN = EXACT.replace("F.one_hot(drawn[0], len(law)).float()", "law")
COLD = EXACT.replace("processors(None, logits[0, 0][None])[0]", "logits[0, 0]")


@pytest.mark.parametrize("source", [EXACT, REDRAWN, COLD])
def test_mistaken_public_functions_are_found(source: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("audit_public")
    file = tmp_path / "eagle/model/utils.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"import no_such_module\n{source}")
    exact = source == EXACT
    monkeypatch.setattr(sys, "argv", ["audit_public.py", "eagle", str(tmp_path), "--draws=800"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    said = capsys.readouterr().out.splitlines()[-1]
    assert (ended.value.code, said) == (not exact, "follows the target" if exact else "DOES NOT FOLLOW THE TARGET")
    found = example.audit(example.SUBJECTS[1], example.Clone(tmp_path), 800)
    assert found.tv < 1e-6 if exact else found.tv > found.noise
    # Both ways agree: the outputs that were drawn, and the law.
    assert abs(found.sampled - found.tv) < 2 * found.noise
    assert (found.pvalue > example.LEVEL) == exact
