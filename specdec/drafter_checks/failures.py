"""A request whose logits are NaN ends, and the drafter goes on for all others, in the same batch and in its slot."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafter_checks.findings import Finding, failed, not_applicable, passed
from specdec.drafter_checks.playing import Job, Run, Stage, run
from specdec.drafter_checks.repeats import ROUNDING
from specdec.drafter_checks.watched import Log, MalformedError
from specdec.requests import SamplingParams

NAN = "NaN logits"


def nan_logits(
    stage: Stage, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, *, tokens: int, comparable: bool
) -> Finding:
    """Decodes two requests beside others that have NaN in their context, and once more in the slots that those had.

    A token that occurs in none of the good requests is given an embedding of NaN, so the others' hidden states and
    logits are not finite.

    Args:
        stage: Where the drafter is tried.
        prompts: The prompts.
        sampling: Parameters of sampled requests.
        tokens: Length of the outputs.
        comparable: Whether drafts depend on the request alone, so that they can be compared.
    """
    # A row without numbers may get any tree that the engine can run, so it is not among the checks of trees.
    apart = replace(stage, log=Log(depth=stage.log.depth, adapts=stage.log.adapts, spoiled=True))
    greedy = SamplingParams(max_new_tokens=tokens, ignore_eos=True, stream=0, seed=sampling.seed)
    good = [Job(prompts[0], greedy), Job(prompts[-1], replace(sampling, max_new_tokens=tokens, stream=1))]
    used = {token for job in good for token in job.prompt}

    def note(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        used.update(inputs[0].flatten().tolist())

    # Everything that is forwarded: rejected nodes and those that are not valid, and a head's mask token.
    first = apart.engine(slots=2)
    with _hooked(stage.target.model, note):
        alone = run(first, good)
    used.update(token for done in alone for token in done.tokens)
    bad = next((token for token in reversed(range(stage.target.vocab_size)) if token not in used), None)
    if bad is None:
        return not_applicable(
            NAN, "every token of the vocabulary occurs in the outputs: no request can be spoiled alone"
        )

    def nan(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.masked_fill((inputs[0] == bad)[..., None], float("nan"))

    longest = max(prompts, key=len)
    spoiled = [
        Job((*longest[:-2], bad, *longest[-2:]), replace(sampling, max_new_tokens=tokens, stream=3)),
        Job((*prompts[1], bad), greedy),
    ]
    engine = apart.engine(slots=4)
    try:
        with _hooked(stage.target.model, nan):
            beside = run(engine, [spoiled[0], good[0], spoiled[1], good[1]], may_fail=True)
            after = run(engine, [*good, *good], may_fail=True)  # in all slots
    except MalformedError as error:
        return failed(NAN, f"beside a request whose logits are NaN, a tree is malformed: {error}")
    for done in (beside[0], beside[2]):
        if done.error is None:
            return failed(NAN, "a request whose logits are NaN did not end with an error")
    for where, runs in (
        ("beside such requests", [beside[1], beside[3]]),
        ("in a slot that one had", after[:2]),
        ("in a slot that one had", after[2:]),
    ):
        for mine, wanted in zip(runs, alone, strict=True):
            difference = _difference(mine, wanted, comparable=comparable)
            if difference is not None:
                return failed(NAN, f"{where}, another request {difference}")
    return passed(
        NAN, "requests with NaN in their context end with an error; beside them and in their slots, others go on"
    )


def _difference(mine: Run, wanted: Run, *, comparable: bool) -> str | None:
    """Returns how a request went otherwise than alone, in words; None if it did not."""
    if mine.error is not None:
        return f"fails: {mine.error}"
    if not comparable:
        return None
    for number, (draft, other) in enumerate(zip(mine.drafts, wanted.drafts, strict=False)):
        difference = draft.difference(other, ROUNDING)
        if difference is not None:
            return f"drafts otherwise than alone in round {number}: {difference}"
    return None if mine.tokens == wanted.tokens else "has another output than alone"


@contextmanager
def _hooked(model: PreTrainedModel, look: Callable[..., Tensor | None]) -> Iterator[None]:
    """Has a function see, or change, what the input embeddings give; the weights are left alone."""
    hook = model.get_input_embeddings().register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()
