"""Rules asked about the drafts of traced runs, and the best tree shapes by a trace's acceptance and costs of rounds."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from experiments.config.kinds import did_you_mean
from experiments.config.sections import bootstrap_of, build, listed, plain, sections
from experiments.datasets.prompt import choose
from experiments.measuring.jobs import prepare
from experiments.planning.drafting import drafter_class
from experiments.reporting import terminal
from experiments.reporting.replay import Optimized, report_found, report_replay
from experiments.results.comparison import distinguishing
from experiments.results.origin import difference, read_manifest
from experiments.results.records import PLAIN, RECORDS, read_records
from experiments.results.rows import Row
from experiments.results.runs import find_folders
from experiments.results.statistics import Bootstrap
from experiments.session.engines import assemble, settle
from experiments.session.methods import drafters_of
from experiments.tracing.along import Text, compared
from experiments.tracing.rates import record
from experiments.tracing.scoring import DraftSet, figures, find_drafts, score
from experiments.tracing.trace import FOLDER, shards
from specdec.drafting.best_shapes import best_shapes, fastest
from specdec.engine.engine import Engine
from specdec.interfaces import Verifier
from specdec.physics.calibrated import CalibratedRounds


def replay(config: DictConfig) -> list[Row] | list[Optimized]:
    """Ask the configuration's verifiers, or all, about the drafts of a trace; print and write what they say."""
    if config.best is not None:
        return best_tree(config)
    bootstrap = bootstrap_of(config)
    rules = named_verifiers(plain(config, "verifiers"))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folders = find_folders(listed(config, "trace"))
    ask = count_rounds if config.along else replay_runs
    return ask(folders, rules, Path(config.out), baseline=config.baseline, bootstrap=bootstrap)


def replay_runs(
    folders: Sequence[Path], rules: Mapping[str, Verifier], out: Path, *, baseline: str, bootstrap: Bootstrap
) -> list[Row]:
    """Ask rules about the drafts of traced runs; print and write what they say, with differences over ``baseline``."""
    manifests, done = [read_manifest(folder) for folder in folders], list[Row]()
    for folder, manifest, settings in zip(folders, manifests, distinguishing(manifests), strict=True):
        parts = [part for part in settings if not part.startswith("sampling.temperature=")]
        ran = build(OmegaConf.create({"verifier": manifest["config"]["verifier"]}), "verifier")
        for drafts in find_drafts(folder, parts, ran):
            done += figures(score(drafts, rules), baseline=baseline, bootstrap=bootstrap)
    done.sort(key=lambda row: row["temperature"])
    report_replay(done, out, confidence=bootstrap.confidence, manifests=manifests)
    return done


def count_rounds(
    folders: Sequence[Path], rules: Mapping[str, Verifier], out: Path, *, baseline: str, bootstrap: Bootstrap
) -> list[Row]:
    """Count the expected rounds of runs' drafters under rules, on what plain decoding wrote there; print and write."""
    manifests, done, base = [read_manifest(folder) for folder in folders], list[Row](), dict[Hashable, list[float]]()
    for folder, manifest, settings in zip(folders, manifests, distinguishing(manifests), strict=True):
        config = DictConfig({**manifest["config"], "contenders": {}})
        target, contenders = assemble(config, drafters_of(config))
        drafters = {
            ", ".join([each.method, *settings]): each.engine.drafter
            for each in contenders
            if each.speculate and isinstance(each.engine, Engine) and each.engine.drafter is not None
        }
        assert target.tokenizer is not None, "assemble refuses a target without one"
        sampling, prompts = build(config, "sampling"), choose(build(config, "dataset"))[0]
        jobs = prepare(prompts, sampling, target.tokenizer, template=plain(config, "chat_template"))
        asked = {(job.prompt.id, job.sample, len(job.prompt_ids)): job.prompt_ids for job in jobs}
        texts: dict[float, dict[str, list[Text]]] = {}
        for each in read_records(folder / RECORDS):
            prompt = asked.get((each.prompt, each.sample, each.prompt_tokens))  # None if it was shortened
            if each.method == PLAIN and each.turn == 0 and each.token_ids and prompt is not None:
                texts.setdefault(each.temperature, {}).setdefault(each.prompt, []).append((prompt, each.token_ids))
        for temperature, some in texts.items():
            params = replace(sampling, temperature=temperature)
            done += compared(target, drafters, rules, some, params, base, baseline=baseline, bootstrap=bootstrap)
    report_replay(done, out, confidence=bootstrap.confidence, manifests=manifests)
    return done


def named_verifiers(given: Any) -> dict[str, Verifier]:
    """Rules by name, as ``sections`` takes them: names, or dictionaries with arguments; None for all."""
    found = sections("verifier", given)
    return {label: build(OmegaConf.create({"verifier": section}), "verifier") for label, section in found.items()}


def traced(folder: Path) -> Path:
    """A folder of a job that left a trace."""
    if not shards(folder / FOLDER):
        raise ValueError(f"{folder} has no trace: give trace=true")
    return folder


def replay_jobs(
    folders: Sequence[Path], out: Path, *, missing: Sequence[str], verifiers: Any = None, baseline: str = "rejection"
) -> None:
    """Ask rules, by default all, about the drafts of a sweep's jobs."""
    print("\n".join(missing), end="\n" * bool(missing))
    replay_runs(folders, named_verifiers(verifiers), out, baseline=baseline, bootstrap=Bootstrap())


def best_tree(config: DictConfig) -> list[Optimized]:
    """Find the best tree at every temperature of the configuration's traces; print and write what was found."""
    bootstrap, costs = bootstrap_of(config), None if config.costs is None else CalibratedRounds.load(config.costs)
    sets, run, target = _traces_of_one_method(config)
    rule = build(OmegaConf.create({"verifier": run["verifier"]}), "verifier")
    settle(config)
    where, rows, timed = "without costs", int(run["engine"]["max_batch_size"]), None
    if costs is not None:
        where = f"costs on {costs.conditions.device}, {rows} row{'s' * (rows > 1)}"
        timed = partial(costs.of_tree, rows=rows)
    about = f"{target} with {drafter_class(run['drafter'])}, {type(rule).__name__}; {where}"
    out, results = Path(config.out), list[Optimized]()
    out.mkdir(parents=True, exist_ok=True)
    for temperature in sorted(sets):
        recorded = record(sets[temperature], rule)
        rates = recorded.rates()
        depth = rates.max_depth if config.max_depth is None else config.max_depth
        planned = best_shapes(rates, max_nodes=config.max_nodes, max_depth=depth)
        best = max(planned, key=lambda shape: shape.tokens) if timed is None else fastest(planned, timed)
        found: Any = {"temperature": temperature, "recorded": recorded, "rates": rates, "planned": planned}
        results.append(Optimized(**found, costs=timed, best=best))
        report_found(terminal.console(), results[-1], out, bootstrap, about)
    return results


def _traces_of_one_method(config: DictConfig) -> tuple[dict[float, list[DraftSet]], dict[str, Any], str]:
    """The drafts of the configuration's method by temperature, the run that made them, and its target's name."""
    folders = find_folders(listed(config, "trace"))
    manifests = [read_manifest(folder) for folder in folders]
    sets = [drafts for folder in folders for drafts in find_drafts(folder)]
    methods = list(dict.fromkeys(drafts.method for drafts in sets))
    method = config.method if config.method is not None else methods[0]
    if config.method is None and len(methods) > 1:
        raise ValueError(f"the trace has drafts of {', '.join(methods)}: give method=NAME")
    if method not in methods:
        raise ValueError(f"method={method!r}: the trace has no such method{did_you_mean(str(method), methods)}")
    runs = [
        run | {"drafter": run["methods"].get(method) if run.get("methods") else run["drafter"]}
        for run in (manifest["config"] for manifest in manifests)
    ]
    made = [{part: run[part] for part in ("drafter", "verifier")} for run in runs if run["drafter"] is not None]
    for other in made[1:]:
        if (found := difference(made[0], other)) is not None:
            what = "{} is {!r} and {!r}".format(*found)
            raise ValueError(f"the traces are of different runs ({what}): optimize each by itself")
    if "shape" not in made[0]["drafter"]:
        name = made[0]["drafter"].get("_target_")
        raise ValueError(f"{name} takes no shape of its own: optimize that of the drafter that it is made of")
    by_temperature: dict[float, list[DraftSet]] = {}
    for drafts in sets:
        if drafts.method == method:
            by_temperature.setdefault(drafts.temperature, []).append(drafts)
    return by_temperature, runs[0] | made[0], manifests[0]["target"]["name"]
