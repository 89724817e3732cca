"""Refuses anything that is not a target, a drafter, a verifier or a scheduler, and says what was meant."""

from pathlib import Path
from typing import Any

from torch import nn

from specdec.arguments import instance
from specdec.attributes import check_drafter_attributes, check_verifier_attributes
from specdec.engine.scheduler import Scheduler
from specdec.interfaces import Drafter, Verifier
from specdec.target.target import Target


def check_parts(target: Any, drafter: Any, verifier: Any, scheduler: Any) -> None:
    """Refuse what an engine cannot be made of, and a drafter and a rule that do not fit each other."""
    if isinstance(target, str | Path):
        raise ValueError(f"target is the text {str(target)!r}: give Target.from_pretrained({str(target)!r})")
    if isinstance(target, nn.Module):
        raise ValueError(f"target is the model {type(target).__name__} itself: give Target(model, tokenizer)")
    instance("target", target, Target, "a Target")
    check_drafter(drafter)
    check_verifier(verifier)
    if scheduler is not None:
        instance("scheduler", scheduler, Scheduler, "a Scheduler, or None for first come, first served")
    if drafter is not None:
        if verifier is None:
            raise ValueError(f"{type(drafter).__name__} needs a verifier: pass for example RejectionVerifier()")
        check_drafter_attributes(drafter)
        check_verifier_attributes(verifier)
        verifier.check(drafter)


def check_drafter(drafter: Any) -> None:
    """Refuse anything but a drafter or None."""
    if isinstance(drafter, Verifier):
        raise ValueError(f"drafter is the verifier {type(drafter).__name__}: give the drafter first, then the verifier")
    if isinstance(drafter, nn.Module | Target):
        raise ValueError(f"drafter is {_model(drafter)}: give ModelDrafter(model), or another Drafter")
    if drafter is not None:
        instance("drafter", drafter, Drafter, "a Drafter, or None for plain decoding")


def check_verifier(verifier: Any) -> None:
    """Refuse anything but a verifier or None."""
    if isinstance(verifier, nn.Module | Target):
        raise ValueError(
            f"verifier is {_model(verifier)}: a verifier is the acceptance rule, give for example RejectionVerifier()"
        )
    if isinstance(verifier, Drafter):
        raise ValueError(f"verifier is the drafter {type(verifier).__name__}: give an acceptance rule in its place")
    if verifier is not None:
        instance("verifier", verifier, Verifier, "an acceptance rule, for example RejectionVerifier()")


def _model(given: object) -> str:
    return f"the model {type(given).__name__} itself" if isinstance(given, nn.Module) else "a Target"
