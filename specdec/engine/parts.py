"""Refusals of what is no target, drafter, verifier or scheduler, and of trees that are not well formed."""

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

from torch import nn

from specdec.arguments import instance, whole
from specdec.batch import Batch
from specdec.engine.scheduler import Scheduler
from specdec.interfaces import Drafter, Session, Verifier
from specdec.requests import Request
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from specdec.wellformed import flaws

_DECLARED: dict[type, dict[str, str]] = {
    Drafter: {"max_nodes": "4", "max_depth": "4", "laws": "frozenset({DraftSampling.IID})", "is_chain": "True"},
    Verifier: {"exactness": "Exactness.EXACT", "samplings": "frozenset({DraftSampling.IID})"},
}
"""The attributes without a default that the engine reads of a component, and an example of each."""
_COMPONENTS: dict[str, tuple[type, str]] = {
    "drafter": (Drafter, "a Drafter such as ModelDrafter(model), or None for plain decoding"),
    "verifier": (Verifier, "an acceptance rule such as RejectionVerifier()"),
}


def check_parts(target: Any, drafter: Any, verifier: Any, scheduler: Any) -> None:
    """Refuse what an engine cannot be made of, and a drafter and a rule that do not fit each other."""
    if isinstance(target, str | Path):
        raise ValueError(f"target is the text {str(target)!r}: give Target.from_pretrained({str(target)!r})")
    if isinstance(target, nn.Module):
        raise ValueError(f"target is the model {type(target).__name__} itself: give Target(model, tokenizer)")
    instance("target", target, Target, "a Target")
    check_component("drafter", drafter)
    check_component("verifier", verifier)
    if scheduler is not None:
        instance("scheduler", scheduler, Scheduler, "a Scheduler, or None for first come, first served")
    if drafter is not None:
        if verifier is None:
            raise ValueError(f"{type(drafter).__name__} needs a verifier: pass for example RejectionVerifier()")
        check_declared(drafter)
        check_declared(verifier)
        verifier.check(drafter)


def check_component(name: str, given: Any) -> None:
    """Refuse anything but a drafter or a verifier, as ``name`` says, or None."""
    (kind, remedy), other = _COMPONENTS[name], "verifier" if name == "drafter" else "drafter"
    if isinstance(given, nn.Module):
        raise ValueError(f"{name} is the model {type(given).__name__} itself: give {remedy}")
    if isinstance(given, _COMPONENTS[other][0]):
        raise ValueError(f"{name} is the {other} {type(given).__name__}: give the drafter first, then the verifier")
    if given is not None:
        instance(name, given, kind, remedy)


def check_declared(component: Drafter | Verifier) -> None:
    """Refuse a component that lacks an attribute which the engine reads, and laws that are no set of laws."""
    name, kind = type(component).__name__, Drafter if isinstance(component, Drafter) else Verifier
    missing = [key for key in _DECLARED[kind] if not hasattr(component, key)]
    if missing:
        lines = "; ".join(f"{key} = {_DECLARED[kind][key]}" for key in missing)
        raise ValueError(
            f"{name} has no {' and no '.join(missing)}: write {lines} into the class, or call super().__init__(…) in "
            f"its constructor"
        )
    key = "laws" if kind is Drafter else "samplings"
    laws = getattr(component, key)
    if not (isinstance(laws, Set) and laws and laws <= set(DraftSampling)):
        raise ValueError(f"{name}.{key}={laws!r}: give a frozenset of DraftSampling")
    for key in ("max_nodes", "max_depth") if kind is Drafter else ():
        whole(f"{name}.{key}", getattr(component, key), least=0)


def check_session(session: Any, drafter: Drafter, *, layers: int | None) -> None:
    """Refuse what is no session, and a session that wants hidden states which the target does not have."""
    instance(f"{type(drafter).__name__}.bind(…)", session, Session, "a Session with the state of one engine")
    wrong = [layer for layer in session.hidden_layers if layers is not None and not -1 <= layer <= layers]
    if wrong:
        raise ValueError(
            f"{type(session).__name__}.hidden_layers names layer {wrong[0]} and the target has {layers} layers: give "
            f"numbers from 0 to {layers}, or -1 for the last hidden state"
        )


def tree_check(
    drafter: Drafter, by_slot: Sequence[Request | None], *, leaf_probs: bool
) -> Callable[[DraftTree, Batch], None]:
    """Returns a check of a round's trees (``Engine(check=True)``), which names request, round and node of a mistake."""

    def check(tree: DraftTree, batch: Batch) -> None:
        for flaw in flaws(tree, drafter, batch, leaf_probs=leaf_probs):
            places = [] if flaw.node is None else [f"node {flaw.node}"]
            if flaw.row is not None:
                request = by_slot[int(batch.on_host.slots[flaw.row])]
                number = "unknown" if request is None else request.id
                places = [f"request {number}", f"round {int(batch.rounds[flaw.row])}", *places]
            place = f" ({', '.join(places)})" if places else ""
            raise ValueError(f"{type(drafter).__name__}{place}: {flaw.what}")

    return check
