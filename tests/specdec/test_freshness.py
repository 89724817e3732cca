"""An engine follows its models: whatever is changed about one between two calls, the output is that of a new engine."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import specdec.execution.replay
from drafters import MedusaDrafter, ModelDrafter
from specdec.engine.engine import Engine
from specdec.execution.freshness import Change, Freshness, Values, steady
from specdec.quantization import quantize
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import medusa_heads, perturbed
from tests.models import tiny_model
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

SAMPLING = SamplingParams(max_new_tokens=24, temperature=0.7)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8]]


class Adapted(nn.Module):
    """A low-rank adapter around a linear layer, as adapter libraries put them in its place."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer
        generator = torch.Generator().manual_seed(3)
        self.down = nn.Parameter(torch.randn(2, layer.in_features, generator=generator))
        self.up = nn.Parameter(torch.randn(layer.out_features, 2, generator=generator))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + inputs @ self.down.t() @ self.up.t()


def adapt(model) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def train(model) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    tokens = torch.arange(40).view(2, 20)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def rotate(model) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 3


def write_data(model) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5).add_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))


def hook(model) -> None:
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * -1)


CHANGES: dict[str, tuple[str, Callable]] = {
    "fused optimizer": ("llama", train),
    "writes to .data": ("llama", write_data),
    "adapter": ("llama", adapt),
    "buffer": ("llama", rotate),
    "softcap in the configuration": ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 0.5)),
    "scale of a module": ("llama", lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0)),
    "window in the configuration": ("mistral_sliding", lambda model: setattr(model.config, "sliding_window", 2)),
    "quantized in place": ("llama", lambda model: quantize(model, "int8")),
    "fewer layers": ("llama", lambda model: setattr(model.model, "layers", model.model.layers[:2])),
    "a hook": ("llama", hook),
    "a norm in place": ("llama", lambda model: model.model.norm.weight.data.neg_()),
}


def decoded(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, SAMPLING)]


def drafted(engine: Engine) -> list[list[list[int]]]:
    """Tokens of every tree that is proposed."""
    trees: list[list[list[int]]] = []
    engine.on_round = lambda seen: trees.append(seen.tree.tokens.tolist())
    engine.generate(PROMPTS, SAMPLING)
    return trees


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.execution.replay, "CAPTURE_AFTER", 2)


@pytest.mark.parametrize("change", CHANGES)
def test_an_engine_follows_its_target(change: str) -> None:
    architecture, apply = CHANGES[change]
    model = tiny_model(architecture, scale=2.0)
    engine = Engine(Target(model), max_batch_size=2, max_length=64)
    before = decoded(engine)
    assert decoded(engine) == before
    apply(model)
    after = decoded(engine)
    assert after != before, "the change changes nothing, so that this shows nothing"
    assert after == decoded(Engine(Target(copy.deepcopy(model)), max_batch_size=2, max_length=64, optimize=False))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        complete(kind, change, strong=kind == "model" or change == "writes to .data")
        for kind in ("model", "medusa")
        for change in ("fused optimizer", "writes to .data", "adapter")
    ],
)
def test_an_engine_follows_its_drafter(change: str, kind: str) -> None:
    """What is drafted is what a new engine with the changed drafter drafts."""
    model = tiny_model("llama", scale=2.0)
    if kind == "model":
        changed: nn.Module = perturbed(model, 0.2)
        drafter = ModelDrafter(changed, 3)  # type: ignore[arg-type]
    else:
        changed = medusa_heads(model)
        drafter = MedusaDrafter(changed, 3)  # type: ignore[arg-type]
    with Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
        before = drafted(engine)
        if kind == "model":
            CHANGES[change][1](changed)
        elif change == "adapter":
            head = changed.heads[0]  # type: ignore[index]
            head[0].linear = Adapted(head[0].linear)
        else:
            with torch.no_grad():
                for parameter in changed.parameters():
                    parameter.data.mul_(-1)
        after = drafted(engine)
    with Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=64, optimize=False) as fresh:
        assert after == drafted(fresh)
    assert after != before, "the change changes nothing, so that this shows nothing"


def test_a_change_that_cannot_be_seen_can_be_told() -> None:
    model = tiny_model("llama", scale=2.0)
    engine = Engine(Target(model), max_batch_size=2, max_length=64)
    before = decoded(engine)
    weight = model.lm_head.weight.data
    weight.view(-1)[1 : weight.numel() // 8 - 1].zero_()
    engine.weights_changed()
    after = decoded(engine)
    assert after != before
    assert after == decoded(Engine(Target(model), max_batch_size=2, max_length=64, optimize=False))


def test_a_changed_model_that_does_not_fit_the_cache_is_refused() -> None:
    model = tiny_model("llama")
    engine = Engine(Target(model), max_length=64)
    decoded(engine)
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[-1].self_attn.layer_idx = 4
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="was changed after this engine was built, and its cache no longer fits"):
        decoded(engine)
    assert engine.unfinished == 0


@pytest.mark.parametrize("optimize", [True, complete(False, strong=False)])
def test_a_model_in_training_mode_decodes_without_dropout(optimize: bool) -> None:
    model = tiny_model("llama", scale=2.0)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    engine = Engine(Target(model), max_batch_size=2, max_length=64, optimize=optimize)
    before = decoded(engine)
    model.train()
    # transformers has renamed it; older ones know the old name only.
    getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))()
    assert decoded(engine) == before
    assert all(module.training for module in model.modules()), "the user's mode is left as it was"
    draft = perturbed(model, 0.1).train()
    greedy = SamplingParams(max_new_tokens=24)
    plain = [output.token_ids for output in engine.generate(PROMPTS, greedy)]
    with Engine(Target(model), ModelDrafter(draft, 3), RejectionVerifier(), max_length=64) as fast:
        assert [output.token_ids for output in fast.generate(PROMPTS, greedy)] == plain
    assert draft.training


def test_autocast_does_not_stay_in_a_captured_forward() -> None:
    model = tiny_model("llama", scale=2.0)
    engine = Engine(Target(model), max_batch_size=2, max_length=64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = engine.generate(PROMPTS, SAMPLING)
    outside = engine.generate(PROMPTS, SAMPLING)
    fresh = Engine(Target(model), max_batch_size=2, max_length=64, optimize=False).generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outside] == [o.token_ids for o in fresh]
    logprobs = [[value for step in o.steps for value in step.logprobs] for o in (inside[0], outside[0], fresh[0])]
    assert logprobs[0][:4] != logprobs[1][:4], "autocast was on"
    torch.testing.assert_close(torch.tensor(logprobs[1]), torch.tensor(logprobs[2]), atol=1e-5, rtol=1e-5)


def test_two_engines_on_one_model_in_two_threads() -> None:
    """Neither sees what the other switches for its forwards, and the model is left as it was."""
    model = tiny_model("llama", scale=2.0)
    engines = [Engine(Target(model), max_batch_size=2, max_length=64, attention=a) for a in ("grouped", "eager")]
    wanted = [decoded(engine) for engine in engines]
    found: list[list[list[tuple[int, ...]]]] = [[], []]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            found[number] += [decoded(engines[number]) for _ in range(6)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found == [[wanted[number]] * 6 for number in range(2)]
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in vars(module) for module in model.modules())


def test_within_steady_a_model_is_looked_at_once() -> None:
    model = tiny_model("llama")
    freshness = Freshness(model)
    with steady():
        assert freshness.look() is Change.NONE
        model.config.use_cache = not model.config.use_cache
        assert freshness.look() is Change.NONE and not freshness.expired()
    assert freshness.expired()
    assert freshness.look() is Change.STRUCTURE
    assert freshness.look() is Change.NONE


def test_values_that_are_not_numbers_do_not_look_changed() -> None:
    tensor = torch.full((8,), float("nan"))
    values = Values([tensor])
    assert not values.changed()
    tensor.data[0] = 1.0
    assert values.changed() and not values.changed()
