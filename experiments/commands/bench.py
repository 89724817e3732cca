"""A benchmark from its configuration: the tables that are printed, and their files."""

from pathlib import Path

import pandas as pd
import torch
from omegaconf import DictConfig

from experiments.bench import measure
from experiments.bench.play import DRAFTS, Case
from experiments.config.kinds import did_you_mean
from experiments.config.sections import plain, plain_whole
from experiments.results.manifest import write_manifest
from experiments.session.engines import check_out
from specdec.dtypes import choose_dtype
from specdec.native import recommended_threads
from specdec.target.loading import resolve_device


def bench(config: DictConfig) -> dict[str, pd.DataFrame]:
    """Measure the parts of a checked configuration, print a table of each, and write it."""
    check_out(config.out)
    device = resolve_device(config.device or "auto")
    if unknown := [name for name in config.drafts if name not in DRAFTS]:
        raise ValueError(f"drafts: there is no {unknown[0]!r}{did_you_mean(unknown[0], DRAFTS)}")
    threads = config.threads or recommended_threads()
    torch.set_num_threads(threads)
    base = Case(
        "plain", device=str(device), dtype=config.dtypes[0], inflate=config.inflate, context=config.context,
        rounds=config.rounds, threads=threads,
    )  # fmt: skip
    lists = {"steps": ("dtypes", "quantizations", "nodes"), "rounds": ("drafts", "temperatures")}
    given = {part: {name: plain(config, name) for name in names} for part, names in lists.items()}
    cases = {
        "steps": measure.step_cases(base, rows=config.batch, **given["steps"]),
        "rounds": measure.round_cases(base, rows=config.batch, **given["rounds"]),
    }
    parts = config.parts or [*cases, *(["gpu"] if device.type == "cuda" and config.against is None else [])]
    asked = {part: cases[part] for part in parts if part in cases}
    tables: dict[str, pd.DataFrame] = {}
    if config.against is not None:
        tables["against"] = measure.against(config.against, asked, repeats=config.repeats, processes=config.processes)
    else:
        tables |= {part: getattr(measure, part)(asked[part]) for part in asked}
    if "gpu" in parts:
        from experiments.bench import gpu  # its drafters and the profiler

        dtype = choose_dtype(torch.bfloat16, device).dtype
        tables["gpu"] = gpu.measure(device, dtype, shape=config.shape, context=1024, seconds=config.seconds)
    out = Path(config.out)
    write_manifest(out, plain_whole(config))
    for name, frame in tables.items():
        frame.to_csv(out / f"{name}.csv", index=False)
        print(f"{name}:\n{frame.to_string(index=False, float_format='{:.3g}'.format, na_rep='-')}\n")
    print(f"wrote into {out}: {', '.join(f'{name}.csv' for name in tables)}")
    return tables
