"""Part 2, eight minutes: what an 8B shape with random weights costs, the most telling figures first.

Every item has a time of its own, and every record is on the disk as soon as it is there.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.bench.engine.steps import Setting, make_runner, measure_step
from experiments.bench.gpu.outcome import Outcome, clocks
from experiments.bench.gpu.profile import measure_kernels
from experiments.bench.gpu.rounds import METHODS, Case, measure_rounds, with_few_words
from experiments.bench.models import make_target, repetitive
from experiments.bench.timing import Budget, timed
from experiments.measuring.forwards import fill, graphed
from experiments.measuring.peaks import measure_peaks
from specdec.engine.engine import Engine
from specdec.machine import dtype_name
from specdec.physics.precision import Precision
from specdec.physics.reading import read_shape
from specdec.physics.work import prefill_work
from specdec.quantization.base import QuantizedLinear
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

NODES = (1, 60, 9, 5)
"""Nodes of a forward: a plain step, EAGLE-3's tree, a chain of eight, one of four."""
ROWS = (1, 9, 24, 60, 72)
"""Rows of products: a plain step, a chain of eight, three of them, a tree, and more than kernels for few rows take."""


def run(outcome: Outcome, only: Sequence[str]) -> None:
    """Measure the items that are asked for; one that fails is left out, and the others are measured."""
    case = Case.of(outcome)
    target = with_few_words(make_target(case.large, outcome.device, case.dtype), case.context)
    for name in only:
        seconds, measure = ITEMS[name]
        budget = Budget(seconds, outcome.left_out)
        print(f"{name}: up to {seconds} s", flush=True)
        with outcome.going_on(name):
            measure(outcome, case, target, budget)
        outcome.add("items", item=name, seconds=seconds - budget.left, clocks=clocks(outcome.device))
        gc.collect()


def _peaks(outcome: Outcome, case: Case, target: Target, budget: Budget) -> None:
    seconds, largest = (0.01, 1 << 22) if outcome.rehearsal else (2.0, None)
    found = measure_peaks(outcome.device, case.dtype, seconds=seconds, largest=largest)
    outcome.figures |= {"copy": found.copy / 1e12, "product": found.flops / 1e12}
    outcome.add("peaks", **found.facts())
    outcome.table("The device at its best: bytes and operations per second", "peaks")


def _forwards(section: str, outcome: Outcome, case: Case, target: Target, budget: Budget) -> None:
    """Time forwards as graphs, by rows and nodes: those of one row, or of several."""
    batches, plain = (1,) if section == "steps" else case.batches, dict[int, float]()
    for setting in (Setting(batch, nodes, case.context) for batch in batches for nodes in NODES):
        if budget.spent(f"step of {setting}"):
            continue
        with outcome.going_on(f"step of {setting}"):
            found = measure_step(make_runner(target, setting, setting.nodes), setting, repeats=5, limit=3.0)
            plain.setdefault(setting.batch, found["seconds"])
            ratio, speed = found["seconds"] / plain[setting.batch], found["bytes"] / found["seconds"]
            chosen = {name: found[name] for name in ("batch", "nodes", "seconds", "executor", "backend")}
            outcome.add(section, **chosen, of_plain=ratio, bytes_per_second=speed)
            if section == "steps":
                outcome.figures |= {f"nodes_{setting.nodes}": ratio, "plain": 1000 * plain[1]}
    outcome.table(f"Forwards behind {case.context} tokens", section)


def _products(outcome: Outcome, case: Case, target: Target, budget: Budget) -> None:
    """Time all products of two layers, by the format of the weights and the number of rows."""
    full: dict[int, float] = {}
    ratios: dict[str, dict[int, float]] = {}
    for scheme in (None, "int4", "fp8", "int8"):
        if budget.spent(f"products in {scheme}"):
            continue
        with outcome.going_on(f"products in {scheme}"), torch.inference_mode():
            of = make_target(case.large, outcome.device, case.dtype, quantization=scheme, num_hidden_layers=2)
            layers = [m for m in of.model.base_model.modules() if isinstance(m, (nn.Linear, QuantizedLinear))]
            for rows in ROWS:
                given = [torch.randn(1, rows, m.in_features, device=of.device).to(case.dtype) for m in layers]

                def call(layers: Sequence[Any] = layers, given: Sequence[Tensor] = given) -> None:
                    for layer, inputs in zip(layers, given, strict=True):
                        layer(inputs)

                graph = graphed(call, of.device)
                seconds = timed(graph or call, of.device, repeats=20, limit=0.5)["seconds"]
                ratio = seconds / full.setdefault(rows, seconds)
                ratios.setdefault(scheme or "full", {})[rows] = ratio
                weights = scheme or dtype_name(case.dtype)
                outcome.add(
                    "products", weights=weights, rows=rows, seconds=seconds, of_full=ratio, graph=graph is not None
                )
    quantized = {scheme: found for scheme, found in ratios.items() if scheme != "full"}
    outcome.figures |= {
        scheme: max(ratio for rows, ratio in found.items() if rows <= 64) for scheme, found in quantized.items()
    }
    outcome.figures["many_rows"] = max((found[ROWS[-1]] for found in quantized.values()), default=None)
    outcome.table("Products of two layers", "products")


def _attention(outcome: Outcome, case: Case, target: Target, budget: Budget) -> None:
    """Time attention alone: forwards of two layers behind a long context without those behind a short one."""
    of = make_target(case.large, outcome.device, case.dtype, num_hidden_layers=2)
    rows, nodes, short = (2, 2, 16) if outcome.rehearsal else (8, 16, 128)

    def forward(context: int, kv_cache: str | None) -> tuple[float, int]:
        runner = ModelRunner(of.model, max_batch_size=rows, max_length=context, max_nodes=nodes, kv_cache=kv_cache)
        fill(runner)
        return measure_step(runner, Setting(rows, nodes, context), repeats=5, limit=3.0)[
            "seconds"
        ], runner.bytes_per_token

    for context in case.contexts:
        taken: list[float] = []
        for kv_cache in (None, "fp8"):
            if budget.spent(f"attention at {context} in {kv_cache}"):
                continue
            with outcome.going_on(f"attention at {context} in {kv_cache}"):
                (long, size), (brief, _) = forward(context, kv_cache), forward(short, kv_cache)
                taken.append(long - brief)
                speed, copy = size * rows * (context - short) / taken[-1], outcome.figures.get("copy")
                keys, shape = kv_cache or dtype_name(case.dtype), {"context": context, "rows": rows, "nodes": nodes}
                outcome.add("attention", keys=keys, **shape, seconds=taken[-1], bytes_per_second=speed)
                if context == case.contexts[0] and kv_cache is None:
                    outcome.figures["attention"] = None if copy is None else speed / copy / 1e12
        if context == case.contexts[0] and len(taken) == 2:
            outcome.figures["fp8_keys"] = taken[1] / taken[0]
    outcome.table("Attention of two layers", "attention")


def _prefill(outcome: Outcome, case: Case, target: Target, budget: Budget) -> None:
    """Time prompts as the engine takes them, in chunks, with the token that follows."""
    shape, peak = read_shape(target.model.config), outcome.figures.get("product")
    once = SamplingParams(max_new_tokens=1, ignore_eos=True)
    for tokens in case.prompts:
        if budget.spent(f"prefill of {tokens}"):
            continue
        with outcome.going_on(f"prefill of {tokens}"), Engine(target, max_length=tokens + 2) as engine:
            engine.warm_up(positions=tokens + 2)  # or the token that follows would be an eager round's
            prompts = [repetitive(tokens, target.vocab_size)]
            found = timed(lambda e=engine, p=prompts: e.generate(p, once), outcome.device, repeats=5, limit=4.0)
            rate = prefill_work(shape, Precision(), tokens=tokens, logits=0).total.flops / found["seconds"]
            share = None if peak is None else rate / peak / 1e12
            outcome.add("prefill", tokens=tokens, seconds=found["seconds"], flops_per_second=rate, of_product=share)
            if tokens == case.prompts[0]:
                outcome.figures["prefill"] = share
    outcome.table("Prompts", "prefill")


def _kernels(outcome: Outcome, case: Case, target: Target, budget: Budget) -> None:
    measure_kernels(outcome, case, target, budget, [each for each in METHODS if each.recording == "rounds"])


ITEMS: dict[str, tuple[float, Callable[[Outcome, Case, Target, Budget], None]]] = {
    "peaks": (10, _peaks), "steps": (40, partial(_forwards, "steps")), "rounds": (150, measure_rounds),
    "products": (50, _products), "attention": (40, _attention), "prefill": (30, _prefill),
    "batches": (40, partial(_forwards, "batches")), "kernels": (60, _kernels),
}  # fmt: skip
"""The items, and the seconds that each may take; what one leaves over is nobody's, so that the whole ends."""
