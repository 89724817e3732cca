"""What EAGLE's heads, MTP modules and block drafters may all have been loaded with by mistake."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.inspecting.wiring import Mistake, Variation, Wiring, elsewhere, final_norm, twin, unit_rms, weight
from specdec.target.target import Target

_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""The usual bases of the rotary angles: Llama 2's and most heads', Llama 3's, Qwen's."""


def other_layers(wiring: Wiring, target: Target, *, last: bool = True) -> Iterator[Variation]:
    """Yields the same head reading other hidden states: its neighbours, the usual ones, or in another order.

    Args:
        wiring: The head.
        target: The target.
        last: Whether its drafter can read the target's last state, too.
    """
    count, layers = target.num_layers or 0, wiring.layers
    numbers = [count if layer == -1 else layer for layer in layers]
    lists = [tuple(number + shift for number in numbers) for shift in (1, -1, 2, -2)]
    if count >= 7 and len(layers) == 3:
        lists.append((2, count // 2, count - 3))
    lists += [tuple(reversed(numbers)), tuple(sorted(numbers))]
    tried = {tuple(layers), tuple(numbers)}
    for each in lists:
        # The last state is read after the final norm: before it, it is a matter of the norm.
        found = tuple(-1 if number == count else number for number in each)
        if found in tried or any(not 0 <= number <= count - (not last) for number in each):
            continue
        tried.add(found)
        yield Variation(
            f"hidden states {_listed(found)}",
            Mistake.LAYERS,
            f"give 'drafter.hidden_layers={_listed(found)}', or correct the layer ids in its config.json",
            replace(wiring, layers=found),
        )


def other_states(wiring: Wiring, *, normed: str = "") -> Iterator[Variation]:
    """Yields the same head reading states that are normed, and states of other places.

    Args:
        wiring: The head.
        normed: What to do if the head wants normed states; empty not to try.
    """
    if normed:
        yield Variation("each hidden state divided by its RMS", Mistake.NORM, normed, replace(wiring, change=unit_rms))
    yield Variation(
        "hidden states of other places",
        Mistake.TARGET,
        "this target's hidden states mean nothing to it: give the target that it was trained on",
        replace(wiring, change=elsewhere),
    )


def other_ropes(wiring: Wiring, target: Target, place: Any) -> Iterator[Variation]:
    """Yields the same head with other rotary embeddings.

    Args:
        wiring: The head.
        target: The target, whose own is tried.
        place: Returns the module of a head that holds the rotary embedding.
    """
    config = wiring.head.config
    own = dict(config.rope_parameters or {})
    if "rope_theta" not in own:
        return  # another one per kind of layer
    text: Any = target.model.config.get_text_config(decoder=True)
    targets = dict(getattr(text, "rope_parameters", None) or {})
    choices = [targets] if "rope_theta" in targets else []
    choices += [{"rope_type": "default", "rope_theta": theta} for theta in _THETAS]
    tried = [own]
    for parameters in choices:
        if parameters in tried:
            continue
        tried.append(parameters)
        found = twin(wiring.head)
        other = copy.deepcopy(config)
        other.rope_parameters = parameters
        holder = place(found)
        try:
            holder.rotary_emb = type(holder.rotary_emb)(other).to(found.device)
        except (KeyError, ValueError):  # a kind that needs more of the configuration than the head has
            continue
        name = f"RoPE of theta {parameters['rope_theta']:,.0f}"
        name += "" if parameters.get("rope_type", "default") == "default" else f", {parameters['rope_type']}"
        name += " (the target's)" if parameters == targets else ""
        yield Variation(
            name,
            Mistake.ROPE,
            f"write 'rope_theta: {parameters['rope_theta']:g}' into its config.json"
            if parameters.get("rope_type", "default") == "default"
            else "copy rope_parameters from the target's config.json into its config.json",
            replace(wiring, head=found),
        )


def other_columns(wiring: Wiring, target: Target) -> Iterator[Variation]:
    """Yields the same head with other readings of its draft vocabulary."""
    ids = wiring.columns
    if ids is None:
        return
    counting = torch.arange(len(ids), device=ids.device)
    stored = ids - counting  # what its d2t holds
    if bool((stored.diff() > 0).all()) and int(stored[0]) >= 0 and int(stored[-1]) < target.vocab_size:
        yield Variation(
            "d2t as tokens, not differences",
            Mistake.VOCABULARY,
            "its d2t holds tokens and not differences: store d2t - torch.arange(len(d2t))",
            replace(wiring, columns=stored),
        )
    if not torch.equal(ids, counting):
        yield Variation(
            "column i as token i",
            Mistake.VOCABULARY,
            "its d2t belongs to another head: its columns are the first tokens of the vocabulary, store zeros",
            replace(wiring, columns=counting),
        )


def other_norms(wiring: Wiring, target: Target, inner: nn.Module) -> Iterator[Variation]:
    """Yields the same head with other norms.

    Args:
        wiring: The head.
        target: The target, whose final norm is tried.
        inner: The part of the head that holds the last norm, as ``norm``.
    """
    own: Any = getattr(inner.norm, "weight", None)
    given = final_norm(target.model)
    path = "" if inner is wiring.head else "model."
    if own is not None and given is not None and own.shape == given.shape and not _same(own, given):
        found = twin(wiring.head)
        found.get_submodule(f"{path}norm").weight = weight(given.to(own.dtype))
        yield Variation(
            "the target's final norm",
            Mistake.NORM,
            "its norm.weight is wrong, or was not saved: store the weight of the target's final norm there",
            replace(wiring, head=found),
        )
    norms = {name: module for name, module in wiring.head.named_modules() if _is_norm(module)}
    if norms and all(float(module.weight.detach().float().mean()) < 0.5 for module in norms.values()):
        found = twin(wiring.head)
        for name in norms:
            module = found.get_submodule(name)
            module.weight = weight(module.weight + 1)
        yield Variation(
            "norms that multiply by 1 + weight",
            Mistake.NORM,
            "its norm weights are centred at zero, as Qwen3-Next's and Gemma's: add 1 to each of them in its files",
            replace(wiring, head=found),
        )


def other_ends(wiring: Wiring, target: Target, *, embeddings: str, tied: Tensor | None) -> Iterator[Variation]:
    """Yields the same head with other embeddings or another output layer, where its own fit neither the target's.

    Args:
        wiring: The head.
        target: The target, whose own are tried.
        embeddings: What to do to get the target's embeddings.
        tied: The head's own embeddings, which may be its output layer; None if it has none.
    """
    model, head = target.model, wiring.head
    theirs: Any = model.get_input_embeddings()
    own = head.get_input_embeddings()
    if own.weight.shape[1] == theirs.weight.shape[1] and not _same(own.weight, theirs.weight):
        found = twin(head)
        _set(found, "embed_tokens", theirs)
        yield Variation("the target's embeddings", Mistake.EMBEDDINGS, embeddings, replace(wiring, head=found))
    output: Any = model.get_output_embeddings()
    rows = output.weight if wiring.columns is None else output.weight[wiring.columns]
    layer = head.get_output_embeddings()
    if layer.weight.shape == rows.shape and not _same(layer.weight, rows):
        yield Variation(
            "the target's output layer",
            Mistake.OUTPUT,
            "its lm_head.weight was not trained with it: leave it out of its files, or store the target's rows there",
            replace(wiring, head=_with_output(head, rows)),
        )
    if (
        tied is not None
        and wiring.columns is None
        and layer.weight.shape == tied.shape
        and not _same(layer.weight, tied)
    ):
        yield Variation(
            "its own embeddings as output layer",
            Mistake.OUTPUT,
            "its output layer is tied to its embeddings: store embed_tokens.weight as lm_head.weight, too",
            replace(wiring, head=_with_output(head, tied)),
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and torch.equal(one, other.to(one.dtype)))


def _with_output(head: Any, rows: Tensor) -> Any:
    found = twin(head)
    found.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    found.lm_head.weight = weight(rows)
    return found


def _set(head: Any, name: str, module: nn.Module) -> None:
    setattr(head.model if hasattr(head, "model") else head, name, module)


def _is_norm(module: nn.Module) -> bool:
    return "RMSNorm" in type(module).__name__ and getattr(module, "weight", None) is not None


def _listed(layers: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, layers)) + "]"
