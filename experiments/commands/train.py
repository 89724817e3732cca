"""A training assembled from its configuration."""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig

from drafters.heads.training import TrainedHead
from experiments.commands.export import export
from experiments.config.sections import build, component_of, job_overrides, plain, plain_whole, typed
from experiments.reporting.progress import TrainingProgress
from experiments.results.manifest import write_manifest
from experiments.results.origin import MANIFEST, read_manifest
from experiments.session.engines import settle
from experiments.session.methods import check_vocabularies
from experiments.session.resume import begun
from experiments.session.tracked import tracked_run
from experiments.tracking.base import NullTracker, Tracker
from experiments.training.comparison import Comparison
from experiments.training.data.document import Documents, Source
from experiments.training.data.packing import Rows, token_counts
from experiments.training.data.regenerate import RegenerateConfig, longest, prompts_of, regenerate, with_originals
from experiments.training.fitting import FitConfig
from experiments.training.loop import BEST, LAST, Plan, Training
from experiments.training.losses import DraftLoss
from experiments.training.served import ServedConfig, served
from experiments.training.served import prompts_of as served_prompts
from experiments.training.sharding import check_processes
from experiments.training.states import FrozenTarget, StoredTarget
from experiments.training.weights import Weights
from specdec import Drafter, Target
from specdec.engine.engine import DEFAULT_MAX_LENGTH, Engine
from specdec.machine import dtype_name, is_native
from specdec.target.loading import resolve_device
from verifiers.rejection import RejectionVerifier

_KINDS: dict[str, type] = {"head": TrainedHead, "loss": DraftLoss, "weights": Weights, "data": Source}


def train(config: DictConfig) -> Path:
    """Train a head, and return the folder of its best weights; with ``export`` that of exported ones."""
    if config.export is not None:
        return export(config)
    given = config.get("target") or {}
    if given.get("dtype") == "auto" and not is_native(torch.bfloat16, resolve_device(given.get("device") or "auto")):
        config.target.dtype = "float32"  # a training's products are torch's
    resumed = begun(config, kind="training", begins=MANIFEST, elsewhere=["device"]) is not None
    settle(config)
    # All that needs no model is checked before one is loaded.
    fit = typed(FitConfig, plain(config, "fit"), "fit")
    trial = typed(ServedConfig, plain(config, "served"), "served")
    writing = plain(config, "regenerate")
    drafter = writing.pop("drafter", None)
    rewritten = typed(RegenerateConfig, writing, "regenerate") if writing.get("file") is not None else None
    component_of(config, "target")
    check_vocabularies(config, ["head", "regenerate.drafter"] if (drafter or {}).get("_target_") else ["head"])
    parts = {name: build(config, name) for name in _KINDS}
    for name, kind in _KINDS.items():
        if not isinstance(parts[name], kind):
            raise ValueError(
                f"{name}._target_={config[name].get('_target_')!r} is no {kind.__module__}.{kind.__name__}: give one"
            )
    head, loss, weights, source = parts.values()
    compared = Comparison(head, loss, weights, chunk=fit.chunk, law=fit.law)
    source.check(unanswered=rewritten is not None)
    tracker: Tracker = build(config, "tracker") or NullTracker()
    accelerator = Accelerator(mixed_precision="no")  # the loop has its own, which it may measure
    main = accelerator.is_main_process
    check_processes(accelerator, sharded=config.sharded, muon=fit.muon_lr is not None)
    folder = Path(broadcast_object_list([config.out])[0])  # where the first process works; others may have no folder
    if config.target.get("device") == "auto":
        config.target.device = str(accelerator.device)
    target: Target = build(config, "target")
    if fit.length > target.max_length:
        raise ValueError(f"fit.length={fit.length}: the target {target.name} has {target.max_length} positions")
    FrozenTarget(target)  # refuses targets that nothing can be trained for, before text is read and written
    documents = source.load(target, unanswered=rewritten is not None)
    if rewritten is not None:
        faster = build(config, "regenerate.drafter") if (drafter or {}).get("_target_") is not None else None
        documents = _rewritten(documents, target, faster, rewritten, config.seed, accelerator)
        # The engine has packed this target's weights, which rounds differently; what is trained must not depend on it.
        target = build(config, "target")
    rows = Rows(documents.training, length=fit.length, batch_size=fit.batch_size, seed=config.seed)
    held_out = Rows(documents.held_out, length=fit.length, batch_size=1, seed=config.seed)
    prompts = served_prompts(documents.held_out, trial)
    torch.manual_seed(config.seed)
    head.begin(target, token_counts(documents.training, target.vocab_size) if head.draft_columns is not None else None)
    frozen = FrozenTarget(target, head.hidden_layers)
    head.to(accelerator.device)
    states: FrozenTarget | StoredTarget = frozen
    if config.states is not None:
        with accelerator.main_process_first():
            states = StoredTarget(frozen, rows, Path(config.states), main=main)
    facts = {
        "head": type(head).__name__,
        **frozen.noted,
        **{name: plain(config, name) for name in ("loss", "weights")},
        "documents": len(documents.training),
        "tokens": sum(len(document.tokens) for document in documents.training),
        "length": fit.length,
        "parameters": sum(p.numel() for p in head.parameters() if p.requires_grad),
        "seed": config.seed,
        "processes": accelerator.num_processes,
    }
    if main:
        if not resumed:
            write_manifest(folder, plain_whole(config), overrides=job_overrides(), exactness={}, training=facts)
        tracker.start(tracked_run(folder, read_manifest(folder)))
    accelerator.wait_for_everyone()
    title = (
        f"{facts['head']}, {facts['parameters']:,} parameters, for {facts['target']}: {facts['tokens']:,} tokens in "
        f"{facts['documents']} documents, {len(rows)} rows of {fit.length}, {fit.steps / rows.steps_per_epoch:.1f} "
        f"epochs; {len(held_out)} rows held out"
    )

    def curve(done: int, figures: Mapping[str, float]) -> None:
        if figures and main:
            tracker.curve("training_step", {name: {done: value} for name, value in figures.items()})

    progress = TrainingProgress(fit.steps, title=title, shown=main, curve=curve)
    serve = (lambda: served(head, target, prompts, trial, seed=config.seed)) if prompts else None
    often = {name: config[name] for name in ("seed", "evaluate_every", "held_out_rows")}
    plan = Plan(folder=folder, held_out=held_out, serve=serve, facts=facts, **often)
    options = {"vocab_size": target.vocab_size, "sharded": config.sharded, "precision": config.mixed_precision}
    exit_code = 1
    try:
        with progress:
            compared.ends = sorted(target.eos_token_ids)
            training = Training(compared, states, rows, fit, plan, accelerator=accelerator, watcher=progress, **options)
            if training.measured:
                full, half = training.measured
                progress.line(
                    f"the gradient of a row takes {full:.2f} s in float32 and {half:.2f} s in bfloat16: training with "
                    f"mixed_precision={training.precision} (a fixed one makes trainings repeatable)"
                )
            progress.begin(training.done)
            training.run()
        exit_code = 0
    except KeyboardInterrupt:
        exit_code = 130
        if main:
            print(f"interrupted: go on with resume=true out={folder}", file=sys.stderr)
        raise
    finally:
        if main:
            tracker.summary(progress.last)
            tracker.finish(exit_code)
    if main:
        print(f"wrote into {folder}: {BEST}/, {LAST}/ and training.jsonl")
    return folder / BEST


def _rewritten(
    documents: Documents, target: Target, faster: Drafter | None, settings: RegenerateConfig, seed: int,
    accelerator: Accelerator,
) -> Documents:  # fmt: skip
    """The documents with the target's own responses. The main process writes them, the others read them."""
    most = min(target.max_length, DEFAULT_MAX_LENGTH)
    if settings.prompt_tokens + settings.max_new_tokens > most:
        raise ValueError(
            f"regenerate.prompt_tokens={settings.prompt_tokens} and max_new_tokens={settings.max_new_tokens} are more "
            f"than the {most} positions of the target: lower them"
        )
    prompts = prompts_of(documents.training, settings, seed)
    asked = [*prompts, *(document for document in documents.held_out if not document.supervised.any())]
    made_with = {"target": target.name, "dtype": dtype_name(target.dtype)}

    def told(done: int, total: int) -> None:
        if accelerator.is_main_process:
            print(f"regenerate: {done} of {total} documents", file=sys.stderr, flush=True)

    # Nothing refers to the engine afterwards: its caches can take more memory than the training.
    rule, room = None if faster is None else RejectionVerifier(), min(most, longest(asked, settings))
    engine = Engine(target, faster, rule, max_batch_size=settings.batch_size, max_length=room)
    with engine, accelerator.main_process_first():
        made = regenerate(asked, engine, settings, seed=seed, made_with=made_with, told=told)
    held = [document for document in documents.held_out if document.supervised.any()] + made[len(prompts) :]
    return Documents(with_originals(made[: len(prompts)], documents.training, settings.original, seed), held)
