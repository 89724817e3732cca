"""How close is the engine to what its device can do? ``seconds=300 only=[steps,rounds]``.

It measures the device's bandwidth and arithmetic first. Then come forwards over the cache by nodes, rows, context,
attention backend and executor; quantized weights; rounds by stage; the speedup of drafts with a given acceptance,
beside the one that the costs predict; llama.cpp on the same weights; and memory. It prints tables, and writes
results.json and two pictures. It needs neither hydra nor wandb. Use an otherwise idle machine.
"""

import time
from dataclasses import asdict

import torch
import transformers

from experiments.bench.engine.goals import Results, goals, with_utilization
from experiments.bench.engine.llamacpp import measure_llama_cpp, why_not
from experiments.bench.engine.report import device_lines, draw, print_tables
from experiments.bench.engine.rounds import cells, measure_acceptance, measure_rounds
from experiments.bench.engine.settings import SHARES, Grid, Options
from experiments.bench.engine.steps import measure_prefill, measure_steps
from experiments.bench.engine.storage import measure_memory, measure_weights
from experiments.bench.models import BUNDLED, dtype_for, make_target
from experiments.bench.options import read_options, refuse
from experiments.bench.timing import Budget
from experiments.measuring.peaks import measure_peaks
from experiments.results.manifest import ROOT, device_name, git_state, versions
from experiments.results.origin import json_text, replace_text
from specdec.machine import dtype_name
from specdec.memory import free_memory
from specdec.native import recommended_threads
from specdec.physics.reading import read_shape
from specdec.target.loading import resolve_device
from specdec.target.runner import ModelRunner
from specdec.target.target import Target


def run(options: Options) -> Results:
    """Measure what was asked for, and write ``results.json`` after every section.

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
        "options": asdict(options),
        "versions": versions(),
        "git": git_state(ROOT),
        "device": {
            "type": device.type,
            "name": device_name(device),
            "threads": torch.get_num_threads(),
            "free_bytes": free_memory(device),
            **roof.facts(),
        },
        "model": _model_facts(target, name, options),
        "grid": asdict(grid),
        "left_out": budget.left_out,
        "seconds": {},
    }
    for line in device_lines(results):
        print(line)
    options.out.mkdir(parents=True, exist_ok=True)
    for number, section in enumerate(options.only):
        began = time.perf_counter()
        # The sections that are left share the time that is left.
        part = budget.share(budget.left * SHARES[section] / sum(SHARES[each] for each in options.only[number:]))
        print(f"{section}: up to {max(0.0, part.left):.0f} s", flush=True)
        _measure(section, results, target, name, grid, options, part)
        results["seconds"][section] = time.perf_counter() - began
        replace_text(options.out / "results.json", json_text(results))
    results["device"] |= roof.better(measure_peaks(device, dtype, seconds=brief)).facts()
    for section in ("steps", "prefill"):
        if section in results:
            results[section] = with_utilization(results[section], results["device"])
    results["goals"] = goals(results)
    replace_text(options.out / "results.json", json_text(results))
    return results


def _measure(
    section: str, results: Results, target: Target, name: str, grid: Grid, options: Options, budget: Budget
) -> None:
    """Put a section's figures into the results."""
    context = grid.context[0]
    if section == "steps":
        results["prefill"] = measure_prefill(target, budget.share(budget.left / 6), repeats=options.repeats)
        results["steps"] = measure_steps(target, grid, budget, repeats=options.repeats, invariant=options.invariant)
    elif section == "weights" and options.quantization is not None:
        budget.skip("quantizations", f"the model itself is in {options.quantization}")
    elif section == "weights":
        results["weights"] = measure_weights(name, target, grid, options, budget)
    elif section == "rounds":
        usual, others = cells(options)
        results["rounds"] = measure_rounds(target, context, options, budget.share(0.6 * budget.left), usual)
        results["ways"] = measure_rounds(target, context, options, budget, others)
    elif section == "synthetic":
        results["synthetic"] = measure_acceptance(target, context, options, budget, batch=1)
        results["synthetic"] += measure_acceptance(target, context, options, budget, batch=4)
    elif section == "peers":
        reason = why_not(target, name) or ("the model is quantized already" if options.quantization else None)
        if reason is None:
            results["llama_cpp"] = measure_llama_cpp(target, name, context, options, budget)
        else:
            budget.skip("llama.cpp", reason)
    else:
        steps = results.get("steps") or [{"once": None}]
        results["memory"] = {**measure_memory(target, grid), "once": steps[0]["once"]}


def _model_facts(target: Target, name: str, options: Options) -> Results:
    shape = read_shape(target.model.config)
    # What a runner reads: its copies of weights may take fewer bytes than the model's own.
    runner = ModelRunner(target.model, max_batch_size=1, max_length=1)
    of_shape = ("kind", "hidden", "vocab", "layer_weights", "output_weights")
    return {
        "name": name,
        "title": target.name if name != BUNDLED else "bundled target",
        "dtype": dtype_name(target.dtype),
        "quantization": options.quantization,
        "parameters": target.num_parameters,
        "weight_bytes": runner.weight_bytes(),
        "kv_bytes_per_token": shape.kept_per_position * target.dtype.itemsize,
        "shape": {**{each: getattr(shape, each) for each in of_shape}, "layers": len(shape.layers)},
    }


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
