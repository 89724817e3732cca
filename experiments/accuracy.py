"""Are the answers as good as plain decoding's? ``python -m experiments.accuracy tasks=gsm8k drafter=model limit=100``.

Runs benchmarks of lm-eval (the extra ``lm-eval``) twice on one engine, plainly and with drafts, and compares the scores
of the same documents. A lossless method has the accuracy of plain decoding, and the paired difference shows how well
that is known.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.given import formats_of, listed, tidy
from experiments.config.launch import launch, rewrite_command_line
from experiments.config.sections import bootstrap_of, build, check_early, plain
from experiments.config.settings import ACCURACY

if TYPE_CHECKING:
    from experiments.grading.accuracy import Accuracy


def accuracy(config: DictConfig) -> "list[Accuracy]":
    """Evaluate the configuration's method and plain decoding; print and write what comes of it.

    Raises:
        ValueError: lm-eval is not installed, a task does not exist or may not run, or there is nothing to compare.
    """
    check_early(config, ACCURACY)
    try:
        from experiments.grading.harness import SpecdecLM, evaluate
    except ImportError as error:
        raise ValueError(f"accuracy needs lm-eval ({error}): pip install '.[lm-eval]'") from error
    from experiments.grading.accuracy import accuracies, scores_of
    from experiments.measuring.measure import Contender
    from experiments.reporting.accuracy import report_accuracy
    from experiments.session.components import check_components
    from experiments.session.engines import new_engine, settle
    from experiments.session.pacing import paced

    settle(config)
    check_components(config, {"": "drafter"}, ("target", "verifier"))
    if config.drafter.get("_target_") is None:
        raise ValueError("drafter=none drafts nothing, so there is nothing to compare: give another drafter")
    if config.execute:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # lm-eval's own graders of programs ask for it, too
    options = {
        "tasks": listed(config, "tasks"),
        "limit": config.limit,
        "num_fewshot": config.fewshot,
        "apply_chat_template": config.chat,
        "gen_kwargs": plain(config, "generation") or None,
        "confirm_run_unsafe_code": config.execute,
    }
    verifier = build(config, "verifier")
    drafter = paced(build(config, "drafter"), build(config, "policy"))
    with new_engine(config, build(config, "target"), drafter, verifier) as engine:
        models = {
            speculate: SpecdecLM(engine, speculate=speculate, max_new_tokens=config.max_new_tokens, seed=config.seed)
            for speculate in (False, True)
        }
        results = {
            speculate: evaluate(model, include=config.include, seed=config.seed, **options)
            for speculate, model in models.items()
        }
        title = f"accuracy: {engine.target.name}, {engine.target.dtype_reason}"
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
        formats=formats_of(config),
        title=title,
    )
    return found


def main() -> None:
    """Evaluate what the command line names."""
    rewrite_command_line(tidy)
    launch(accuracy, "accuracy")


if __name__ == "__main__":
    main()
