"""The work of a call, by hand; meters whose counters are lists or files; what engines hold."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters import MedusaDrafter, MergedDrafter, ModelDrafter, NGramDrafter
from experiments.measuring import meters
from experiments.measuring.accounting import Accountant, ModelWork
from experiments.measuring.meters import LoadMeter, held_by, process_bytes
from experiments.measuring.peaks import Peaks, measure_peaks
from experiments.session.engines import peaks_of
from specdec import Engine, Target
from specdec.physics.devices import read_devices, row_of
from specdec.physics.shape import Attention, Layer, Mlp, ModelShape
from specdec.quantization import quantize
from specdec.quantization.base import QuantizedLinear
from specdec.types import Completion, Step
from tests.components import medusa_heads
from tests.models import tiny_model
from verifiers import RejectionVerifier

SIZES: Any = {"max_batch_size": 3, "max_length": 40}


def test_load_in_cores() -> None:
    # Within 2 s, cores were busy for 5 s, of which this process had 3 s.
    meter = LoadMeter(iter([(10.0, 100.0, 7.0, 4), (12.0, 105.0, 10.0, 4)]).__next__)
    assert meter.stop() == {"cores": 4, "own": 1.5, "others": 1.0}
    assert LoadMeter(lambda: None).stop() == {}
    assert LoadMeter(lambda: (1.0, 1.0, 1.0, 4)).stop() == {}, "no time has passed"
    here = LoadMeter()
    while not (load := here.stop()):
        pass
    assert load["cores"] >= 1


def test_a_counter_that_stops_answering_fails_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([7.0])
    monkeypatch.setattr(meters, "_counter", lambda device: lambda: next(answers))
    assert [meters.joules_of(torch.device(name)) for name in ("cpu", "cuda", "cuda")] == [None, 7.0, None]


def test_what_engines_share_counts_once() -> None:
    target, small = Target(tiny_model()), tiny_model("llama_mqa_tied")
    engine = Engine(target, ModelDrafter(small, shape=[2, 2], kv_cache="int8"), RejectionVerifier(), **SIZES)
    alone = Engine(target, **SIZES)
    held = held_by([engine, engine, alone])
    assert held["kv"] == 2 * held_by([alone])["kv"], "an engine that is named twice counts once"
    for model, found in ((target.model, held["weights"]), (small, held["drafter"])):
        tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}.values()
        assert found == sum(t.numel() * t.element_size() for t in tensors), "a table that is shared counts once"
    assert held_by([alone, Engine(target, **SIZES)])["copies"] == sum(alone.runner.executor.copies().values())
    heads = medusa_heads(target.model)
    drafter = MergedDrafter(lookup=NGramDrafter(), model=MedusaDrafter(heads))
    held = held_by([Engine(target, drafter, RejectionVerifier(), **SIZES)])
    assert held["drafter"] == sum(p.numel() * p.element_size() for p in heads.parameters()) > 0
    assert held["drafter_kv"] == 0, "heads and parts of other drafters count"


def test_panels_apart_from_weights_are_copies_and_a_process_holds_at_least_all() -> None:
    """The engine's bytes are counted: no layer is left out whose C reads another order of its integers."""
    engine = Engine(Target(quantize(tiny_model(), "int8", check=False)), **SIZES)
    layers = [layer for layer in engine.target.model.modules() if isinstance(layer, QuantizedLinear)]
    held, process = held_by([engine]), process_bytes()
    own = {each.data_ptr() for each in engine.target.model.parameters()}
    parts: list[Any] = [part for layer in layers if (each := layer.panels()) for part in (each.panels, each.scales)]
    assert held["copies"] == sum(part.nbytes for part in parts if part.data_ptr() not in own)
    assert held["total"] < process["process"] <= process["most"]


def test_a_gpu_is_found_by_its_name_and_memory() -> None:
    asked = ("NVIDIA H100 80GB HBM3", 80), ("NVIDIA A100-SXM4-40GB", 40), ("NVIDIA GeForce RTX 1234", 24)
    found = [row_of(name, gigabytes * 1e9, read_devices()) for name, gigabytes in asked]
    assert [row and row.name for row in found] == ["h100", "a100-40gb", None]


def test_a_processor_that_widens_16_bits_is_measured_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a product of 16-bit numbers is emulated, forwards are widened, and would reach several times its rate."""
    best = "experiments.measuring.peaks.shortest"
    for widened, plain in ((4.0, 1.0), (1.0, 4.0)):  # seconds, of a processor that widens and of one that does not
        monkeypatch.setattr(best, lambda call, *of, w=widened, p=plain: w if call().dtype == torch.bfloat16 else p)
        found, usual = (
            measure_peaks(torch.device("cpu"), of, seconds=0, largest=1 << 20).flops
            for of in (torch.bfloat16, torch.float32)
        )
        assert (found == usual) is (widened > plain) and found >= usual


def test_peaks_of_a_busy_moment_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Peaks(copy=2e9, read=3e9, flops=5e9, cache_bytes=1)
    monkeypatch.setattr("experiments.session.engines.brief_peaks", lambda *of: quiet)
    target: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    before = {"copy": 4e9, "read": 1e9, "flops": 1e9, "cache_bytes": 1, "older": 9e9}
    assert peaks_of(target, before) == before | {"read": 3e9, "flops": 5e9}


# One layer of 100 weights in attention and 200 in the MLP, 50 in the output layer; 4 FLOP per head and width; 8 numbers
# of keys and values per position.
ATTENTION = Attention.grouped(weights=100, heads=3, kv_heads=2, head_dim=2)
SHAPE = ModelShape(
    kind="toy", hidden=5, vocab=10, layers=(Layer(attention=ATTENTION, mlp=Mlp(weights=200)),),
    table_weights=50, output_weights=50, tied=True,
)  # fmt: skip
TARGET = ModelWork.of(SHAPE, weight_bytes=700.0, kv_bytes=16.0)
PAIR = 4 * 3 * 2
TOKEN = 2 * (300 + 50)
FIRST, SECOND = {"prefill": 1.0, "verify": 0.5}, {"verify": 0.6}


def done(prompt: int, *rounds: tuple[dict[str, float], int, int, int]) -> Completion:
    """A request whose rounds have these seconds, drafted nodes, depth, and accepted tokens."""
    names = ("seconds", "proposed_nodes", "proposed_depth", "accepted")
    facts = [dict(zip(names, each, strict=True)) for each in rounds]
    steps = tuple(Step(request=0, round=number, token_ids=(1,), **each) for number, each in enumerate(facts))
    return Completion(prompt_ids=(1,) * prompt, token_ids=(), text="", finish_reason="length", steps=steps)


# Two rows. In the first round they verify 3 and 2 nodes besides the root, and keep 2 and 0; the second has one row.
CALL = [done(5, (FIRST, 3, 3, 2), (SECOND, 1, 1, 1)), done(9, (FIRST, 2, 2, 0))]


def test_the_work_of_a_call_is_counted_by_hand() -> None:
    work = Accountant(target=TARGET, chunk=512).of_call(CALL)
    assert (work["verified"], work["committed"]) == (4 + 3 + 2, 3 + 1 + 2)
    # Rows behind 4, 8 and 7 positions; the nodes of a chain see themselves and half of their own, on average.
    assert work["verify_bytes"] == 2 * 700 + 16 * (4 + 8 + 7) + 16 * (4 + 3 + 2)
    pairs = 4 * (4 + 1 + 1.5) + 3 * (8 + 1 + 1) + 2 * (7 + 1 + 0.5)
    assert work["verify_flops"] == pytest.approx(TOKEN * 9 + PAIR * pairs)
    assert work["useful_flops"] == pytest.approx(TOKEN * 6 + PAIR * (3 * 5 + 1 * 9 + 2 * 8))
    pieces = Accountant(target=TARGET, chunk=6).of_call(CALL)
    # Prompts of 4 and 8 tokens before their last: 4 and 6 at once, then 2 more behind 6. No logits, so no output layer.
    assert pieces["prefill_forwards"] == 2
    assert pieces["prefill_bytes"] == pytest.approx(2 * 700 * 300 / 350 + 16 * 6 + 16 * 12)
    assert pieces["prefill_flops"] == pytest.approx(2 * 300 * 12 + PAIR * (4 * 2.5 + 6 * 3.5 + 2 * (6 + 1.5)))
    # A drafter reads its weights once per level.
    accountant = Accountant(target=TARGET, drafter=ModelWork.of(SHAPE, weight_bytes=30.0, kv_bytes=16.0))
    drafted = accountant.of_call(CALL)
    assert drafted["draft_forwards"] == 3 + 1
    assert drafted["draft_bytes"] == 30 * 4 + 16 * (3 * 4 + 2 * 8 + 1 * 7)
    assert replace(accountant, at_once=True).of_call(CALL)["draft_forwards"] == 2
