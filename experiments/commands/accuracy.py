"""A method's answers to lm-eval's benchmarks, beside plain decoding's."""

import os
from pathlib import Path

from omegaconf import DictConfig

from experiments.config.sections import bootstrap_of, build, listed, plain, plain_whole
from experiments.measuring.measure import Contender
from experiments.reporting.studies.accuracy import accuracies, report_accuracy, scores_of
from experiments.results.manifest import ROOT, git_state, machine, versions
from experiments.results.rows import Row
from experiments.session.assembly import said_of
from experiments.session.engines import new_engine, settle
from experiments.session.methods import check_components
from experiments.session.policies import paced
from specdec.engine.intake import encode_chat


def accuracy(config: DictConfig) -> list[Row]:
    """Evaluate the configuration's method and plain decoding; print and write what comes of it."""
    try:
        from experiments.grading.harness import SpecdecLM, evaluate
    except ImportError as error:
        raise ValueError(f"accuracy needs lm-eval ({error}): pip install 'specdec-research[lm-eval]'") from error
    settle(config)
    check_components(config, {"": "drafter"}, ("target", "verifier"))
    grading = config.grading
    if config.drafter.get("_target_") is None:
        raise ValueError("drafter=none drafts nothing, so there is nothing to compare: give another drafter")
    if grading.execute:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # lm-eval's own graders of programs ask for it, too
    renamed = {"fewshot": "num_fewshot", "chat": "apply_chat_template", "execute": "confirm_run_unsafe_code"}
    options = {renamed.get(name, name): grading[name] for name in ("limit", "include", *renamed)}
    options |= {"tasks": listed(config, "grading.tasks"), "gen_kwargs": plain(config, "grading.generation") or None}
    template = plain(config, "chat_template") if grading.chat else None
    verifier, drafter = build(config, "verifier"), paced(build(config, "drafter"), build(config, "policy"))
    with new_engine(config, build(config, "target"), drafter, verifier) as engine:
        encode_chat(engine.target.tokenizer, [{"role": "user", "content": "Hello"}], template) if grading.chat else None
        shared = {"max_new_tokens": grading.max_new_tokens, "seed": config.seed, "template": template}
        models = {speculate: SpecdecLM(engine, speculate=speculate, **shared) for speculate in (False, True)}
        results = {which: evaluate(model, seed=config.seed, **options) for which, model in models.items()}
        title = f"accuracy: {engine.target.name}, {engine.target.dtype_reason}{said_of(template)}"
    found = accuracies(scores_of(results[False]), scores_of(results[True]), bootstrap := bootstrap_of(config))
    if not found:
        raise ValueError(f"tasks={options['tasks']}: no task has a score for single documents, give another one")
    report_accuracy(
        found,
        Path(config.out),
        method=str(config.method),
        exactness=Contender(str(config.method), engine).exactness,
        length=models[True].mean_acceptance_length,
        confidence=bootstrap.confidence,
        title=title,
        made={"config": plain_whole(config), "versions": versions(), "git": git_state(ROOT), "machine": machine()},
    )
    return found
