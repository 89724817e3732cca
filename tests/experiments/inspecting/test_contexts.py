"""Causes of a fall with the context, planted in copies of the target, are named; where they look alike, none is.

The target's tokens depend on all that it sees, and texts change their topic, so that a drafter which sees less of them
differs. Draws of curves without a fall are called falls in fewer than 1 of 100 cases.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from drafters.model import ModelDrafter
from experiments.inspecting.acceptance import Acceptance
from experiments.inspecting.contexts import Cause, Curve, Explanation, Limits, cause_of, play_at
from experiments.reporting.checks import contexts_table, contexts_verdict
from specdec.target.target import Target
from tests.components import perturbed

VOCAB, LENGTHS = 64, (16, 32, 64, 128, 256)
SIZES: Any = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 12, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip


def model() -> LlamaForCausalLM:
    """A random model whose attention matters much."""
    torch.manual_seed(0)
    found: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).float().eval()
    for name, weight in found.named_parameters():
        if weight.ndim > 1:
            factor = 4.0 if "o_proj" in name else 1.5 if "lm_head" in name else 1.0
            weight.data.normal_(0, 1.0 if "embed" in name else factor * weight.shape[-1] ** -0.5)
    return found


def texts(count: int = 8, topic: int = 40) -> list[list[int]]:
    """Random texts that have eight words of a topic for a while, then eight others."""
    generator = torch.Generator().manual_seed(0)

    def words() -> list[int]:
        return torch.randperm(VOCAB, generator=generator)[torch.randint(8, (topic,), generator=generator)].tolist()

    parts = range(LENGTHS[-1] // topic + 1)
    return [[word for _ in parts for word in words()][-LENGTHS[-1] :] for _ in range(count)]


def windowed(given: Any, window: int) -> MistralForCausalLM:
    """The same weights, of which every layer sees a window."""
    found = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).float().eval()
    found.load_state_dict(given.state_dict())
    return found


class Turned(nn.Module):
    """A rotary embedding at other positions and of another size."""

    def __init__(self, inner: nn.Module, moved: Callable[[Tensor], Tensor], size: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner, self.moved, self.size = inner, moved, size

    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        self.seen, size = position_ids, self.size(position_ids)[..., None]
        return tuple(part * size for part in self.inner(states, self.moved(position_ids)))


def turned(given: Any, moved: Any = lambda places: places, size: Any = torch.ones_like) -> Any:
    given.model.rotary_emb = Turned(given.model.rotary_emb, moved, size)
    return given


def table_of(given: Any, rows: int) -> Any:
    """A model whose rotary embedding is a table of so many rows, the last of which stands for all others."""
    return turned(given, lambda places: places.clamp(max=rows - 1))


def tired(given: Any, trained: int) -> Any:
    """A model whose attention is off by more with every doubling of the length."""
    return turned(given, size=lambda places: 1 + 0.25 * (places / trained).clamp(min=1).log2())


def unsure(given: Any, place: int) -> Any:
    """A model that is less certain from some position on."""
    turned(given, lambda places: places)
    rotary: Any = given.model.rotary_emb
    given.model.norm.register_forward_hook(
        lambda norm, inputs, output: output * torch.where(rotary.seen < place, 1.0, 0.5)[..., None]
    )
    return given


def found(drafter: Any, limits: Limits, target: Any = None) -> tuple[Curve, Explanation]:
    shown = Target(model() if target is None else target, name="toy")
    curve = play_at(ModelDrafter(drafter, 2, sampling="iid"), shown, texts(), LENGTHS, limits, tokens=12)
    return curve, cause_of(curve)


near, far = perturbed(model(), 0.02), 512
CAUSES: dict[str, tuple[Callable[[], Any], Limits, Cause | None]] = {
    "a window": (lambda: windowed(near, 40), Limits(window=40, positions=far), Cause.WINDOW),
    "a table that ends": (lambda: table_of(copy.deepcopy(near), 80), Limits(positions=80), Cause.POSITIONS),
    "the same, and a window that hides nothing": (
        lambda: table_of(copy.deepcopy(near), 80), Limits(window=20, positions=80), Cause.POSITIONS
    ),
    "short texts": (lambda: tired(copy.deepcopy(near), 24), Limits(positions=far, trained=24), Cause.TRAINING),
    "a window as long as its positions": (lambda: windowed(near, 40), Limits(window=40, positions=50), Cause.WINDOW),
    "a table as long as a window": (lambda: table_of(copy.deepcopy(near), 80), Limits(window=100, positions=80), None),
    "a window, and files that speak of another length": (lambda: windowed(near, 40), Limits(window=100), None),
    "a table that ends, and files that say nothing": (lambda: table_of(copy.deepcopy(near), 80), Limits(), None),
}  # fmt: skip
FIRST = ("a window",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else pytest.mark.full) for n in CAUSES])
def test_a_cause_is_named_where_it_can_be_told(name: str) -> None:
    make, limits, cause = CAUSES[name]
    curve, finding = found(make(), limits)
    assert finding.sure == (cause is not None), (finding, curve.tokens.mean(0))
    said = " ".join(contexts_verdict(curve, finding))
    if cause is None:
        assert "The cause cannot be told." in said and finding.fall > 0.2
    else:
        assert finding.cause is cause and f"The likely cause: {cause}. What to do: " in said


@pytest.mark.full
def test_a_drafter_as_good_at_every_length_is_not_accused() -> None:
    curve, finding = found(perturbed(model(), 0.1), Limits(window=40, positions=80, trained=24))
    assert finding.cause is Cause.NONE
    assert "does not fall with the context: from 16 to 256 tokens" in contexts_verdict(curve, finding)[0]


@pytest.mark.full
@pytest.mark.parametrize("positions", [80, 512])
def test_a_target_that_is_less_certain_is_named_though_a_limit_is_there(positions: int) -> None:
    _, finding = found(perturbed(model(), 0.1), Limits(positions=positions), unsure(model(), 80))
    assert finding.cause is Cause.TARGET and finding.sure


# ---------------------------------------------------------------- curves by hand


def curve_of(
    means: Sequence[float], limits: Limits, *, entropies: Sequence[float] | None = None, seed: int = 0
) -> Curve:
    """A curve of ten prompts of four rounds each, which accept one token with these probabilities."""
    generator = np.random.default_rng(seed)
    own = generator.normal(0, 0.2, 10)
    listed = []
    for at, mean in enumerate(means):
        rates = (mean + own + generator.normal(0, 0.07, 10)).clip(0, 1).repeat(4)
        lengths = torch.tensor(rates)[:, None]
        entropy = torch.full((40,), 3.0 if entropies is None else entropies[at], dtype=torch.double)
        prompts = torch.arange(10).repeat_interleave(4)
        listed.append(Acceptance(lengths, torch.ones_like(lengths), prompts, 0.1, torch.ones(2) / 2, entropy))
    return Curve([128 * 2**at for at in range(len(means))], listed, limits)


def test_honest_curves_are_hardly_ever_called_falls() -> None:
    limits = Limits(window=200, positions=1024, trained=512)
    called = [cause_of(curve_of([0.5] * 6, limits, seed=seed)).cause for seed in range(200)]
    assert called.count(Cause.NONE) >= 198


STEP, RAMP = [0.7, 0.7, 0.7, 0.3, 0.3, 0.3], [0.7, 0.7, 0.7, 0.55, 0.4, 0.25]


@pytest.mark.parametrize(
    ("means", "limits", "cause"),
    [
        (STEP, Limits(window=512), Cause.WINDOW),
        (STEP, Limits(positions=600), Cause.POSITIONS),
        (STEP, Limits(positions=600, trained=512), Cause.POSITIONS),
        (RAMP, Limits(positions=512), Cause.TRAINING),
        (RAMP, Limits(positions=4096, trained=512), Cause.TRAINING),
        (STEP, Limits(window=512, positions=600), None),
        (STEP, Limits(positions=256), None),
        (STEP[:4], Limits(positions=512), None),  # of a single length beyond, the shape cannot be seen
        (RAMP, Limits(), None),
    ],
)
def test_the_shape_and_the_place_decide(means: list[float], limits: Limits, cause: Cause | None) -> None:
    finding = cause_of(curve_of(means, limits))
    assert (finding.cause if finding.sure else None) is cause, finding
    assert finding.cause is not Cause.NONE


def test_entropy_that_rises_where_acceptance_falls() -> None:
    limits = Limits(positions=600)
    steep = curve_of(STEP, limits, entropies=[2.0, 2.0, 2.0, 3.0, 3.0, 3.0])
    named = cause_of(steep)
    assert (named.cause, named.sure, named.gap) == (Cause.TARGET, True, (512, 1024))
    doubtful = cause_of(curve_of(STEP, limits, entropies=[2.0, 2.0, 2.0, 2.15, 2.15, 2.15]))
    assert not doubtful.sure and set(doubtful.others) == {Cause.TARGET} and doubtful.cause is Cause.POSITIONS
    before = curve_of(STEP, limits, entropies=[3.0, 3.0, 3.0, 2.0, 2.0, 2.0])
    assert cause_of(before).cause is Cause.POSITIONS


def test_the_table_says_which_limits_a_length_is_beyond() -> None:
    made = contexts_table(curve_of(STEP, Limits(window=300, positions=600)), 16)
    assert [row[-1].text for row in made.rows] == [
        "", "", "window of 300", "max_position_embeddings of 600", "", ""
    ]  # fmt: skip
    assert made.rows[0][2].text == "" and made.rows[3][2].text.startswith("-0.3")


def test_lengths_that_cannot_be_compared() -> None:
    target, drafter = Target(model(), name="toy"), ModelDrafter(near, 2, sampling="iid")

    def play(prompts: Sequence[Sequence[int]], *lengths: int) -> None:
        play_at(drafter, target, prompts, lengths, Limits(), tokens=8)

    with pytest.raises(ValueError, match=r"contexts=\[16\]: give two lengths or more"):
        play(texts(), 16)
    with pytest.raises(ValueError, match="2 prompts tell no difference from chance: give three or more"):
        play(texts(2), 16, 32)
    with pytest.raises(ValueError, match=r"a prompt has 256 tokens, and contexts=\[16, 512\] asks for 512"):
        play(texts(), 16, 512)


def test_texts_that_end_before_a_draft_leave_too_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([curve_of([0.5], Limits(), seed=seed).found[0] for seed in range(2)])

    def played(*_: object, **__: object) -> Acceptance:
        whole = next(given)
        return replace(whole, prompts=whole.prompts.clamp(max=1))

    monkeypatch.setattr("experiments.inspecting.contexts.play", played)
    target, drafter = Target(model(), name="toy"), ModelDrafter(near, 2, sampling="iid")
    with pytest.raises(ValueError, match=r"of 8 prompts, 2 have drafts at all of contexts=\[16, 32\]"):
        play_at(drafter, target, texts(), [16, 32], Limits(), tokens=8)


def test_a_window_counts_where_no_layer_sees_everything() -> None:
    assert Limits.of(windowed(near, 40)) == Limits(window=40, positions=far)
    mixed: Any = windowed(near, 40)
    mixed.config.layer_types = ["sliding_attention", "full_attention"]
    assert Limits.of(mixed, 128) == Limits(positions=far, trained=128)
    assert Limits.of(nn.Linear(2, 2)) == Limits()
