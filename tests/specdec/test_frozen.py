"""A model is frozen while an engine serves it: a change is refused until it is told, and no old weights are used."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from drafters import MedusaDrafter
from specdec import Engine, SamplingParams, Target
from specdec.quantization import quantize
from tests.components import medusa_heads
from tests.models import tiny_model
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

SAMPLING = SamplingParams(max_new_tokens=12, temperature=0.7)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8]]
REFUSED = r"was changed while an engine serves it \({}\): call Engine.weights_changed\(\)"


def wrapped(layer: nn.Linear) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(layer, nn.Linear(layer.out_features, layer.out_features))


def adapt(model) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = wrapped(attention.q_proj)


@torch.no_grad()
def write(model, unseen: bool = False) -> None:
    for parameter in model.parameters():
        written = parameter.data if unseen else parameter
        written.mul_(0.5).add_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))


OTHER = "another module or tensor is in it"
CHANGES = {
    "an optimizer's writes": ("its weights were written to", write),
    "writes to .data": (None, partial(write, unseen=True)),
    "adapter": (OTHER, adapt),
    "quantized in place": (OTHER, lambda model: quantize(model, "int8")),
    "a hook": ("a hook was added", lambda model: model.lm_head.register_forward_hook(lambda *given: -given[-1])),
    "settings": (None, lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0)),  # not seen
}


def decoded(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SAMPLING)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.execution.forwards.CAPTURE_AFTER", 2)
    monkeypatch.setattr("specdec.engine.recording.RECORD_AFTER", 2)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        *(complete(each, {}, strong=each != "quantized in place") for each in CHANGES),
        ("an optimizer's writes", {"recording": "rounds"}),
    ],
)
def test_a_changed_target_is_refused_until_it_is_told(change: str, options: dict[str, str]) -> None:
    seen, apply = CHANGES[change]
    model = tiny_model(scale=2.0, layers=2)
    engine = Engine(Target(model), max_batch_size=2, max_length=64, **options)
    before = decoded(engine)
    apply(model)
    for _ in range(2 if seen else 0):
        with pytest.raises(ValueError, match=REFUSED.format(seen)):
            decoded(engine)
        assert engine.unfinished == 0
    engine.weights_changed()
    after = decoded(engine)
    assert after != before, "the change changes nothing, so that this shows nothing"
    assert after == decoded(Engine(Target(copy.deepcopy(model)), max_batch_size=2, max_length=64, optimize=False))


def test_a_changed_drafter_is_refused_until_it_is_told() -> None:
    model = tiny_model(scale=2.0, layers=2)
    heads = medusa_heads(model)
    parts = Target(model), MedusaDrafter(heads, 3), RejectionVerifier()
    sizes = {"max_batch_size": 2, "max_length": 64}

    def drafted(engine: Engine) -> list[object]:
        trees: list[object] = []
        # A recorded round drafts deeper than a row has room for, which is not valid.
        engine.on_round = lambda seen: trees.append(seen.tree.tokens[seen.tree.valid].tolist())
        decoded(engine)
        return trees

    def adapt_heads(heads) -> None:
        heads.heads[0][0].linear = wrapped(heads.heads[0][0].linear)

    engine = Engine(*parts, **sizes)
    for change in (adapt_heads, write):
        before = drafted(engine)
        change(heads)
        with pytest.raises(ValueError, match="weights_changed"):
            decoded(engine)
        engine.weights_changed()
        assert drafted(engine) == drafted(Engine(*parts, **sizes, optimize=False)) != before, change


def test_a_changed_model_that_no_longer_fits_is_refused() -> None:
    model = tiny_model()
    engine = Engine(Target(model), max_length=64)
    decoded(engine)
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[-1].self_attn.layer_idx = 4
    model.config.num_hidden_layers = 5
    engine.weights_changed()
    for _ in range(2):
        with pytest.raises(ValueError, match="cache no longer fits"):
            decoded(engine)
    assert engine.unfinished == 0
    model = tiny_model()
    engine = Engine(Target(model), max_length=64)
    model.double()
    with pytest.raises(ValueError, match=REFUSED.format("it was moved")):
        decoded(engine)
    engine.weights_changed()
    with pytest.raises(ValueError, match=r"built, and moved to torch.float64"):
        decoded(engine)


def test_a_model_in_training_mode_decodes_without_dropout() -> None:
    model = tiny_model(scale=2.0, layers=2)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    engine = Engine(Target(model), max_batch_size=2, max_length=64)
    before = decoded(engine)
    model.train()
    # transformers has renamed it; older ones know the old name only.
    getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))()
    assert decoded(engine) == before
    assert all(module.training for module in model.modules()), "the user's mode is left as it was"


def test_autocast_does_not_stay_in_a_captured_forward() -> None:
    model = tiny_model(scale=2.0, layers=2)
    engine = Engine(Target(model), max_batch_size=2, max_length=64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = engine.generate(PROMPTS, SAMPLING)[0]
    outside = engine.generate(PROMPTS, SAMPLING)[0]
    fresh = Engine(Target(model), max_batch_size=2, max_length=64, optimize=False).generate(PROMPTS, SAMPLING)[0]
    assert outside.token_ids == fresh.token_ids
    assert inside.logprobs[:4] != outside.logprobs[:4], "autocast was on"
    assert outside.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_two_engines_on_one_model_in_two_threads() -> None:
    """Neither sees what the other switches for its forwards, and the model is left as it was."""
    model = tiny_model(scale=2.0, layers=2)
    engines = [Engine(Target(model), max_batch_size=2, max_length=64, attention=a) for a in ("grouped", "eager")]
    wanted = [[decoded(engine)] * 3 for engine in engines]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda engine: [decoded(engine) for _ in range(3)], engines)] == wanted
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in vars(module) for module in model.modules())
