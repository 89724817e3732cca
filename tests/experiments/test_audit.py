"""Audits of decoders: honest ones, a mistaken one, ones that end early or answer nonsense."""

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from experiments.audit import audit
from experiments.results.frame import Figures
from specdec.checks.mistakes import Place
from specdec.engine.engine import Engine
from specdec.random import Purpose, uniforms
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import perturbed
from tests.experiments.conftest import byte_tokenizer
from tests.experiments.contenders.test_openai import Server
from tests.experiments.runs import Configure
from tests.gemma4 import KINDS, assistant, sharpened, text

HERE = "tests.experiments.test_audit"
models: dict[str, Any] = {}


@pytest.fixture
def audited(configure: Configure, saved: Path, tmp_path: Path) -> Callable[..., Figures]:
    """Audits with the tiny models, of few prompts and mistakes."""
    for name in ("target", "drafter"):
        models[name] = Target.from_pretrained(str(saved / name), dtype="float32").model
    small = [f"target.name={saved / 'target'}", f"drafter.name={saved / 'drafter'}", f"assistant={saved / 'drafter'}"]
    small += ["dataset.count=3", "context=4", "threads=1", f"out={tmp_path / 'out'}", "sampling.temperature=0.3"]
    small += ["mistakes=[one_hot,residual_from_p]", "max_samples=4096", "sampling.ignore_eos=true"]

    def run(*words: str) -> Figures:
        return audit(configure("audit", *small, *words))

    return run


@torch.inference_mode()
def _next(name: str, ids: list[int]) -> torch.Tensor:
    return models[name](torch.tensor([ids])).logits[0, -1].float()


def mistaken(ids: list[int], sampling: SamplingParams, n: int) -> list[list[int]]:
    """Draft the most probable token and report a smooth q, as engines have done."""
    key = torch.tensor([sampling.seed])

    @functools.cache
    def at(path: tuple[int, ...]) -> Place:
        return Place.of(_next("target", [*ids, *path]), _next("drafter", [*ids, *path]), sampling)

    best = int(at(()).q.argmax())
    outputs = []
    for number in range(n):
        u = uniforms(key, torch.tensor([number]), Purpose.ACCEPT, sampling.max_new_tokens + 1)[0]
        p, q = torch.from_numpy(at(()).p), torch.from_numpy(at(()).q)
        stays = float(u[0]) * q[best] <= p[best]
        tokens = [best if stays else _drawn((p - q).clamp(min=0), u[1])]
        while len(tokens) < sampling.max_new_tokens:
            tokens.append(_drawn(torch.from_numpy(at(tuple(tokens)).p), u[len(tokens) + 1]))
        outputs.append(tokens)
    return outputs


def _drawn(weights: torch.Tensor, u: torch.Tensor) -> int:
    return int(torch.searchsorted(weights.cumsum(0), u * weights.sum(), right=True).clamp(max=len(weights) - 1))


def nonsense(ids: list[int], sampling: SamplingParams, n: int) -> Any:
    return models["answers"](n, ids, sampling)


def test_our_engine_is_lossless(audited: Callable[..., Figures], tmp_path: Path, capsys: Any) -> None:
    found = audited()
    said = " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert "shows no sign of a mistake" in said and "At most 736 outputs of 3 tokens" in said
    assert written["verdict"] == found.verdict == "no sign of a mistake"
    assert found.outputs == found.planned and found.p_value > 1e-3 and found.tokens == 3 * found.outputs
    assert all(each["power"] >= 0.99 for each in found.power if each["distance"] >= 0.02)
    with pytest.raises(ValueError, match="holds the results of another audit"):
        audited()


def test_a_mistake_that_shipped_is_found_within_2000_tokens(audited: Callable[..., Figures], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mistaken is not lossless: e = .* it looks most like one_hot"):
        audited(f"function={HERE}.mistaken")
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert found["tokens"] <= 2_000 and found["log10_e"] > 3.3 and found["verdict"] == "not lossless"


def test_an_interrupted_audit_goes_on(
    audited: Callable[..., Figures], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = audited(f"out={tmp_path / 'whole'}")
    calls, original = [0], Engine.generate

    def generate(engine: Engine, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] in (3, 5):
            raise KeyboardInterrupt if calls[0] == 3 else ConnectionError("it went away")
        return original(engine, *arguments)

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(ValueError, match=r"no verdict yet, .* after 64 outputs .* resume=true goes on \(interrupted\)"):
        audited()
    with (tmp_path / "out" / "samples.jsonl").open("a") as file:
        file.write('{"prompt": 0, "outp')  # it was killed while it wrote
    with pytest.raises(ValueError, match=r"ConnectionError: it went away"):
        audited("resume=true")
    found = audited("resume=true")
    assert found.bets == whole.bets and found.outputs == whole.outputs


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (lambda n, *_: None, "nonsense returned NoneType where 32 outputs were asked for: return a list of n lists"),
        (lambda n, *_: [[1, 2, 3]] * (n - 1), "returned list where 32 outputs were asked for"),
        (lambda n, *_: [[1, 2, 3]] * n, "one and the same output 32 times, .* it ignores the temperature, or the seed"),
        (lambda n, *_: [[1]] * n, "returned 1 tokens where 2 are needed"),
        (lambda n, *_: [[1, 2, 9_999]] * n, "returned token 9999, and the target has 257 tokens"),
    ],
)
def test_nonsense_is_one_sentence(
    audited: Callable[..., Figures], answers: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models, "answers", answers)
    with pytest.raises(ValueError, match=said):
        audited(f"function={HERE}.nonsense")
    assert not (tmp_path / "out" / "audit.json").exists()


def test_a_server_that_cannot_be_audited(audited: Callable[..., Figures], saved: Path) -> None:
    """It returns text alone, decodes greedily whatever it is asked for, or goes away."""
    server = Server(Target.from_pretrained(str(saved / "target"), dtype="float32"))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    words = ["+contender=openai", f"contenders.openai.base_url={server.url}", "engine.max_batch_size=4", "block=8"]
    with pytest.raises(ValueError, match="the server returns no token ids"):
        audited(*words)
    words.append("+contenders.openai.extra={return_token_ids:true}")
    with pytest.raises(ValueError, match="it ignores the temperature, or the seed"):
        audited(*words)
    server.refuse = True
    with pytest.raises(RuntimeError, match=r"refused a request: .*no such parameter"):
        audited(*words)
    server.shutdown()
    server.server_close()
    thread.join()
    with pytest.raises(ValueError, match="no OpenAI-compatible server answers"):
        audited(*words)


@pytest.mark.full
@pytest.mark.parametrize("mended", [False, True])
def test_gemma_4_assistants_in_transformers(
    audited: Callable[..., Figures], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """They draft the most probable token and hand over the logits as q (5.23, candidate_generator.py, line 1350).

    With logits of 0 at that token and -inf elsewhere, as it was chosen without randomness, the audit passes.
    """
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 257, "vocab_size_per_layer_input": 257}
    config = text(
        **sizes, hidden_size=32, num_hidden_layers=4, layer_types=KINDS * 2, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
    )  # fmt: skip
    model, drafts = sharpened(Gemma4ForCausalLM(config)), assistant(vocab_size=257)
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    perturbed(model, 0.3).save_pretrained(tmp_path / "other")
    drafts.generation_config.num_assistant_tokens = 1
    original = SinglePositionMultiTokenCandidateGenerator.get_candidates

    def one_hot(self: Any, input_ids: Any, **given: Any) -> Any:
        ids, logits = original(self, input_ids, **given)
        chosen = ids[:, input_ids.shape[1] :, None]
        return ids, logits if logits is None else torch.full_like(logits, -torch.inf).scatter(-1, chosen, 0.0)

    if mended:
        monkeypatch.setattr(SinglePositionMultiTokenCandidateGenerator, "get_candidates", one_hot)

    def generate(n: int, ids: list[int], sampling: SamplingParams) -> list[list[int]]:
        given = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "max_new_tokens": 3}
        one = torch.tensor([ids])
        torch.manual_seed(sampling.seed)
        made = [
            model.generate(one, assistant_model=drafts, pad_token_id=0, eos_token_id=None, **given) for _ in range(n)
        ]
        return [each[0, len(ids) :].tolist() for each in made]

    monkeypatch.setitem(models, "answers", generate)
    words = [f"target.name={tmp_path / 'target'}", f"assistant={tmp_path / 'other'}", f"function={HERE}.nonsense"]
    words += ["sampling.temperature=1", "sampling.top_p=1", "max_samples=1000", "dataset.count=16"]
    if mended:
        assert audited(*words).verdict == "no sign of a mistake"
        return
    with pytest.raises(ValueError, match="is not lossless"):
        audited(*words)
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["tokens"] <= 2_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sampling.temperature=0"], "leaves nothing to chance"),
        (["mistakes=[one_hott]"], "did you mean one_hot"),
        (["function=nowhere.generate"], "there is no module 'nowhere'"),
        ([f"function={HERE}.mistaken", "+contender=hf_generate"], "several subjects"),
        (["assistant={saved}/other"], "has 757 tokens, and .* has 257"),
        (["level=2"], "level=2"),
    ],
)
def test_what_cannot_be_audited(audited: Callable[..., Figures], words: list[str], said: str, saved: Path) -> None:
    with pytest.raises(ValueError, match=said):
        audited(*(word.format(saved=saved) for word in words))
