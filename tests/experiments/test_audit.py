"""Audits of decoders: honest ones, a mistaken one, ones that end early or answer nonsense."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from experiments.audit import audit
from specdec.checks.mistakes import MISTAKES
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.experiments.contenders.test_openai import serving
from tests.experiments.runs import Configure, Stop

HERE = "tests.experiments.test_audit"
EXAMPLES = Path(__file__).parents[2] / "examples"
models: dict[str, Any] = {}


@pytest.fixture
def audited(configure: Configure, saved: Path, tmp_path: Path) -> Callable[..., Any]:
    """Audits with the tiny models, of few prompts and mistakes."""
    models["target"] = Target.from_pretrained(str(saved / "target"), dtype="float32").model
    small = [f"target.name={saved / 'target'}", f"drafter.name={saved / 'drafter'}", f"assistant={saved / 'drafter'}"]
    small += ["dataset.count=3", "context=4", "threads=1", f"out={tmp_path / 'out'}", "sampling.temperature=0.3"]
    small += ["mistakes=[one_hot,residual_from_p]", "max_samples=4096", "sampling.ignore_eos=true"]

    def run(*words: str) -> Any:
        return audit(configure("audit", *small, *words))

    return run


def nonsense(ids: list[int], sampling: SamplingParams, n: int) -> Any:
    return models["answers"](n, ids, sampling)


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


def test_nonsense_and_what_cannot_be_audited_is_one_sentence(
    audited: Callable[..., Any], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonsense = f"function={HERE}.nonsense"
    for number, (answers, words, said) in enumerate(
        [
            (None, nonsense, "nonsense returned NoneType where 32 outputs were asked for: return a list of n lists"),
            ([1, 2, 3], nonsense, "one and the same output 32 times, .* it ignores the temperature, or the seed"),
            ([1, 2, 9_999], nonsense, "returned token 9999, and the target has 257 tokens"),
            (None, "function=nowhere.generate", "function._target_='nowhere.generate': there is no such"),
            (None, f"{nonsense} +contender=hf_generate", "several subjects"),
            (None, f"assistant={saved}/other", "has 757 tokens, and .* has 257"),
            (None, "sampling.temperature=0", "a run compares greedy outputs with plain decoding's"),
            (None, "sampling.adapter=a", "adapter=a: the law of sampled outputs is computed without"),
        ]
    ):
        monkeypatch.setitem(models, "answers", lambda n, *_, each=answers: each and [each] * n)
        with pytest.raises(ValueError, match=said):
            audited(*words.split(), f"out={tmp_path / str(number)}")
    assert not [*tmp_path.glob("*/audit.json")]


def test_a_server_that_goes_away_is_audited_in_the_end_and_settings_of_its_own_are_told_by_name(
    audited: Callable[..., Any], saved: Path, tmp_path: Path
) -> None:
    with serving(Target.from_pretrained(str(saved / "target"), dtype="float32")) as server:
        words = ["+contender=openai", f"contenders.openai.base_url={server.url}", "engine.max_batch_size=4", "block=8"]
        words.append("+contenders.openai.extra={return_token_ids:true}")
        server.drops = {27, 28, 29}
        with pytest.raises(
            ValueError, match=r"no verdict yet, .* after 24 outputs .* \(the server at .*gave no answer"
        ):
            audited(*words, "max_samples=96")
        server.drops = set()
        found = audited(*words, "max_samples=96", "resume=true")
        assert found["verdict"] == "no sign of a mistake" and found["outputs"] == found["planned"]
        assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == found["outputs"] // 8

        server.ignores = {"top_p"}
        words += ["mistakes=[one_hot,top_p_ignored,own_min_p,own_penalty]", f"out={tmp_path / 'mistaken'}"]
        with pytest.raises(ValueError, match="it looks most like top_p_ignored: the request's top-p is not used"):
            audited(*words, "max_samples=512")


def test_another_tokenizer_is_told_from_a_mistake(audited: Callable[..., Any], monkeypatch: Any) -> None:
    def shifted(n: int, ids: list[int], sampling: SamplingParams) -> list[list[int]]:
        settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.3, "pad_token_id": 0}
        drawn = models["target"].generate(torch.tensor([ids] * n), max_new_tokens=sampling.max_new_tokens, **settings)
        return ((drawn[:, len(ids) :] + 1) % 256).tolist()

    monkeypatch.setitem(models, "answers", shifted)
    with pytest.raises(ValueError, match=r"is not lossless: .* of these outputs cannot come from the target: does the"):
        audited(f"function={HERE}.nonsense")


@pytest.mark.parametrize("patched", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_mistake_that_shipped_in_transformers_is_found_within_2000_tokens(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
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
    row = depth = 0
    while True:
        law = softmax(processors(None, logits[row, depth][None])[0], 0)
        drawn = torch.multinomial(law, 1)
        below = torch.zeros(len(candidates), dtype=torch.bool)
        if depth + 1 < candidates.shape[1]:
            below = (candidates[:, : depth + 1] == candidates[row, : depth + 1]).all(1)
            below &= candidates[:, depth + 1] == drawn
        if not below.any():
            return row, depth, F.one_hot(drawn[0], len(law)).float()
        row, depth = int(below.int().argmax()), depth + 1
"""
"""Goes down while a draw from p is a child, and then emits that draw."""
REDRAWN = EXACT.replace("F.one_hot(drawn[0], len(law)).float()", "law")
COLD = EXACT.replace("processors(None, logits[row, depth][None])[0]", "logits[row, depth]")


@pytest.mark.parametrize("source", [EXACT, REDRAWN, COLD])
def test_an_exact_public_function_passes_and_mistaken_ones_do_not(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repository that accepts as EAGLE's function is called."""
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
