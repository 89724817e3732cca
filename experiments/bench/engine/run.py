"""How close is the engine to what its device can do? ``seconds=300 only=[steps,rounds]``.

It measures the device's bandwidth and arithmetic first. Then come forwards over the cache by nodes, rows, context,
attention backend and executor; quantized weights; rounds by stage; the speedup of drafts with a given acceptance,
beside the one that the costs predict; transformers' generate and llama.cpp on the same weights; and memory. It prints
tables, and writes results.json and two pictures. It needs neither hydra nor wandb. Use an otherwise idle machine.
"""

import gc
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from experiments.bench.engine.acceptance import measure_acceptance
from experiments.bench.engine.goals import Results, goals, with_utilization
from experiments.bench.engine.llamacpp import measure_llama_cpp, why_not
from experiments.bench.engine.peers import measure_peers
from experiments.bench.engine.report import device_lines, draw, print_tables
from experiments.bench.engine.rounds import cells, measure_rounds
from experiments.bench.engine.settings import Grid, Options
from experiments.bench.engine.steps import measure_prefill, measure_steps
from experiments.bench.engine.storage import decode_large, measure_memory, measure_weights
from experiments.bench.models import BUNDLED, dtype_for, make_target
from experiments.bench.options import read_options, refuse
from experiments.bench.timing import Budget
from experiments.measuring.peaks import Peaks, measure_peaks
from experiments.results.manifest import ROOT, device_name, git_state, versions
from specdec.machine import dtype_name, recommended_threads
from specdec.memory import free_memory
from specdec.physics.shape import ModelShape
from specdec.target.loading import resolve_device
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

SHARES = {"steps": 0.32, "weights": 0.14, "rounds": 0.16, "synthetic": 0.1, "peers": 0.24, "memory": 0.04}
"""How the time is divided; what a section does not need is left for the others."""


def run(options: Options) -> Results:
    """Measure what was asked for, and write ``results.json`` after every section.

    Args:
        options: The command line.

    Raises:
        ValueError: The device, the dtype or a size does not fit.
    """
    device = resolve_device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(options.threads or recommended_threads())
    budget = Budget(options.seconds)
    # The roof's own time is short: it is measured again at the end, and the better of both counts.
    brief = min(2.0, options.seconds / 60)
    dtype = dtype_for(options.dtype, device)
    name = options.model if options.model != "auto" else "llama-8b" if device.type == "cuda" else "110m"
    target = make_target(name, device, dtype, quantization=options.quantization)
    grid = Grid.of(options, device, target.max_length)
    roof = measure_peaks(device, dtype, seconds=brief)
    results: Results = {
        "schema": 1,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()},
        "versions": versions(),
        "git": git_state(ROOT),
        "device": _device_facts(device, roof),
        "model": _model_facts(target, name, options),
        "grid": asdict(grid),
        "left_out": budget.left_out,
        "seconds": {},
    }
    for line in device_lines(results):
        print(line)
    options.out.mkdir(parents=True, exist_ok=True)
    for section in options.only:
        began = time.perf_counter()
        # The sections that are left share the time that is left.
        later = options.only[options.only.index(section) :]
        part = budget.share(budget.left * SHARES[section] / sum(SHARES[each] for each in later))
        print(f"{section}: up to {max(0.0, part.left):.0f} s", flush=True)
        _measure(section, results, target, name, grid, options, part)
        results["seconds"][section] = time.perf_counter() - began
        _write(results, options.out)
    roof = roof.better(measure_peaks(device, dtype, seconds=brief))
    results["device"] |= roof.facts()
    if device.type == "cuda" and "weights" in options.only and name == "llama-8b":
        del target
        gc.collect()
        torch.cuda.empty_cache()
        results["large"] = decode_large(device, dtype, budget)
    for section in ("steps", "prefill"):
        if section in results:
            results[section] = with_utilization(results[section], results["device"])
    results["goals"] = [{**asdict(goal), "met": goal.met} for goal in goals(results)]
    _write(results, options.out)
    return results


def _measure(
    section: str, results: Results, target: Target, name: str, grid: Grid, options: Options, budget: Budget
) -> None:
    """Put a section's figures into the results."""
    context = grid.context[0]
    if section == "steps":
        results["prefill"] = measure_prefill(target, budget.share(budget.left / 6), repeats=options.repeats)
        results["steps"] = measure_steps(target, grid, budget, repeats=options.repeats, invariant=options.invariant)
    elif section == "weights":
        if options.quantization is not None:
            budget.skip("quantizations", f"the model itself is in {options.quantization}")
            return
        results["weights"] = measure_weights(name, target, grid, options, budget)
    elif section == "rounds":
        usual, others = cells(options)
        results["rounds"] = measure_rounds(target, context, options, budget.share(0.6 * budget.left), usual)
        results["ways"] = measure_rounds(target, context, options, budget, others)
    elif section == "synthetic":
        found = [measure_acceptance(target, context, options, budget, batch=batch) for batch in (1, 4)]
        results["synthetic"] = [each for each in found if each is not None]
    elif section == "peers":
        reason = why_not(target, name)
        if reason is None and options.quantization is None:
            results["llama_cpp"] = measure_llama_cpp(target, name, context, options, budget.share(budget.left / 3))
        else:
            budget.skip("llama.cpp", reason or "the model is quantized already")
        results["peers"] = measure_peers(target, name, context, options, budget)
    else:
        found = measure_memory(target, grid)
        steps = results.get("steps") or [{"once": None}]
        results["memory"] = {**found, "once": steps[0]["once"]}


def _device_facts(device: torch.device, roof: Peaks) -> dict[str, Any]:
    return {
        "type": device.type,
        "name": device_name(device),
        "threads": torch.get_num_threads(),
        "free_bytes": free_memory(device),
        **roof.facts(),
    }


def _model_facts(target: Target, name: str, options: Options) -> dict[str, Any]:
    shape = ModelShape.of(target.model.config)
    # What a runner reads: its copies of weights may take fewer bytes than the model's own.
    runner = ModelRunner(target.model, max_batch_size=1, max_length=1)
    return {
        "name": name,
        "title": target.name if name != BUNDLED else "bundled target",
        "dtype": dtype_name(target.dtype),
        "quantization": options.quantization,
        "parameters": target.num_parameters,
        "weight_bytes": runner.weight_bytes(),
        "kv_bytes_per_token": shape.kept_per_position * target.dtype.itemsize,
        "shape": {
            "kind": shape.kind,
            "hidden": shape.hidden,
            "vocab": shape.vocab,
            "layers": len(shape.layers),
            "layer_weights": shape.layer_weights,
            "output_weights": shape.output_weights,
        },
    }


def _write(results: Results, folder: Path) -> None:
    """Write what there is; whatever happens meanwhile, the file is the old one or the new one."""
    new = folder / "results.json.new"
    new.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(new, folder / "results.json")


def main() -> None:
    """Measure, print the tables and draw the pictures."""
    options = read_options(Options, __doc__)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        results = run(options)
    except ValueError as error:
        refuse(error)
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        refuse(ValueError(f"the model does not fit into the device's memory ({reason}): take a smaller one"))
    print_tables(results)
    written = [options.out / "results.json", *draw(results, options.out)]
    print(f"wrote into {options.out}: {', '.join(path.name for path in written)}")
