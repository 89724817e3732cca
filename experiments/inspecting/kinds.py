"""The kinds of trained drafters: what they usually bring, and which mistakes in loading them are likeliest."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.feature import FeatureDrafter
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from drafters.mtp import MTPDrafter
from specdec.interfaces import Drafter
from specdec.target.target import Target


class Mistake(StrEnum):
    """A common mistake in a drafter that loads and drafts badly."""

    LAYERS = "wrong hidden layers"
    NORM = "a wrong norm"
    ROPE = "another rotary embedding"
    HALVES = "swapped halves of a concatenation"
    MASK_TOKEN = "the wrong mask token"
    SHIFT = "heads that are counted from another token"


@dataclass(frozen=True)
class Alternative:
    """Another way to load a drafter, which is right if one mistake was made.

    Attributes:
        name: What is changed.
        mistake: What was wrong, if this is right.
        remedy: What to set, or to do.
        settings: The drafter's settings that differ.
        edit: Changes the loaded drafter in place; None for nothing.
    """

    name: str
    mistake: Mistake
    remedy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Any], object] | None = None


@dataclass(frozen=True)
class Usual:
    """Figures of published heads of a kind, on targets of 7 to 8 billion weights.

    Attributes:
        first: The acceptance at depth 1, in chat and in mathematics or code.
        lengths: Simulated or served length of a chain, likewise.
    """

    first: tuple[float, float]
    lengths: tuple[float, float]
    depth: int
    source: str


_DEEPSPEC = "Qwen3-8B at T = 1, arXiv 2607.05147"
USUAL: dict[str, Usual] = {
    "EAGLE-1 head": Usual((0.60, 0.80), (2.2, 3.5), 5, "roughly, by reports on Vicuna-7B"),
    "EAGLE-3 head": Usual((0.53, 0.81), (2.5, 5.3), 7, _DEEPSPEC),
    "MTP module": Usual((0.70, 0.90), (2.2, 3.4), 3, "roughly, by reports on DeepSeek-V3, GLM and Qwen"),
    "block head (DFlash)": Usual((0.72, 0.88), (2.8, 5.3), 7, _DEEPSPEC),
    "block head (DSpark)": Usual((0.72, 0.88), (3.2, 6.2), 7, _DEEPSPEC),
    "Medusa heads": Usual((0.45, 0.65), (1.7, 2.3), 4, "roughly, by reports on Vicuna-7B"),
}
"""By the name of the kind. A small model has no usual figures: they depend on its size."""


def kind_of(drafter: Drafter) -> str:
    """Returns the name of a drafter's kind; refuses one without a trained model, or with several."""
    match drafter:
        case EagleDrafter():
            return "EAGLE-1 head" if isinstance(drafter.head, EagleHead) else "EAGLE-3 head"
        case BlockDrafter():
            return f"block head ({'DSpark' if drafter.head.config.shifted else 'DFlash'})"
        case MTPDrafter():
            return "MTP module"
        case FeatureDrafter():
            return "P-EAGLE head"
        case MedusaDrafter():
            return "Medusa heads"
        case ModelDrafter():
            return "model"
        case _:
            raise ValueError(
                f"{type(drafter).__name__} is not one trained model, so there is nothing to inspect: give "
                f"drafter=eagle, peagle, mtp, block, medusa or model (of a combination its parts, one by one)"
            )


def layers_of(drafter: Drafter, target: Target) -> tuple[int, ...]:
    """Returns the target's hidden states that a drafter reads; none for a small model."""
    match drafter:
        case FeatureDrafter():
            return tuple(drafter.layers_for(drafter.head_for(target), target))
        case BlockDrafter():
            return tuple(drafter.hidden_layers)
        case MedusaDrafter():
            return (-1,)
        case _:
            return ()


def alternatives(drafter: Drafter, target: Target, given: Collection[str] = ()) -> Iterator[Alternative]:
    """Yields the likeliest other ways to load a drafter, at most three kinds of them.

    Args:
        given: Names of the settings that stand in place of what its files say, which are tried without.
    """
    for name, mistake in (("hidden_layers", Mistake.LAYERS), ("mask_token_id", Mistake.MASK_TOKEN)):
        if name in given:
            yield Alternative(f"{name} of its own files", mistake, f"leave out drafter.{name}", {name: None})
    match drafter:
        case EagleDrafter(head=Eagle3Head() as head):
            yield from _layers(drafter, target)
            before = not head.norm_before_residual
            yield Alternative(
                f"the residual stream begins {'normed' if before else 'un-normed'}",
                Mistake.NORM,
                f"write 'norm_before_residual: {str(before).lower()}' into its config.json (and specdec.json)",
                edit=lambda loaded: setattr(loaded.head.model.layers[0], "norm_before_residual", before),
            )
            yield from _rope(head.config, target)
        case EagleDrafter():
            yield Alternative(
                "the hidden state before the embedding",
                Mistake.HALVES,
                "it joins the hidden state before the embedding: swap the two halves of the columns of fc.weight",
                edit=lambda loaded: _swap_halves(loaded.head.model.fc),
            )
            yield from _rope(drafter.head.config, target)
        case FeatureDrafter(head=Eagle3Head() as head):
            yield from _layers(drafter, target)
            yield from _rope(head.config, target)
        case BlockDrafter():
            yield from _layers(drafter, target)
            yield from _masks(drafter, target)
        case MTPDrafter():
            other = "after" if drafter.head_for(target).before_norm else "before"
            yield Alternative(
                f"the last state {other} the final norm",
                Mistake.NORM,
                f"give drafter.hidden_state={other}_norm",
                {"hidden_state": f"{other}_norm"},
            )
        case MedusaDrafter() if drafter.heads.num_heads > 1:
            yield Alternative(
                "its second head as the first",
                Mistake.SHIFT,
                "its first head predicts what the target's own output layer does: leave it out of its files, and count "
                "the others from 0",
                edit=lambda loaded: setattr(
                    loaded.heads, "heads", loaded.heads.heads[1:].append(loaded.heads.heads[-1])
                ),
            )
        case _:
            pass


def _layers(drafter: FeatureDrafter | BlockDrafter, target: Target) -> Iterator[Alternative]:
    """Yields other hidden states: the neighbours, the usual three, and in another order."""
    count, layers = target.num_layers or 0, layers_of(drafter, target)
    lists = [tuple(layer if layer < 0 else layer + shift for layer in layers) for shift in (1, -1)]
    if count >= 7 and len(layers) == 3:
        lists.append((2, count // 2, count - 3))
    lists += [tuple(sorted(layers)), tuple(reversed(layers))]
    for each in dict.fromkeys(lists):
        if each != layers and all(-1 <= layer < count for layer in each):
            shown = "[" + ",".join(map(str, each)) + "]"
            yield Alternative(
                f"hidden states {shown}",
                Mistake.LAYERS,
                f"give 'drafter.hidden_layers={shown}', or correct the layer ids in its config.json",
                {"hidden_layers": list(each)},
            )


def _rope(config: Any, target: Target) -> Iterator[Alternative]:
    """Yields the target's rotary embedding, where the head's is another."""
    text: Any = target.model.config.get_text_config(decoder=True)
    own, theirs = (dict(getattr(each, "rope_parameters", None) or {}) for each in (config, text))
    if "rope_theta" not in own or "rope_theta" not in theirs or own == theirs:
        return

    def edit(loaded: Any) -> None:
        inner = loaded.head.model
        loaded.head.config.rope_parameters = theirs
        inner.rotary_emb = type(inner.rotary_emb)(loaded.head.config)

    yield Alternative(
        f"RoPE of theta {theirs['rope_theta']:,.0f} (the target's)",
        Mistake.ROPE,
        f"write 'rope_theta: {theirs['rope_theta']:g}' into its config.json"
        if theirs.get("rope_type", "default") == "default"
        else "copy rope_parameters from the target's config.json into its config.json",
        edit=edit,
    )


def _masks(drafter: BlockDrafter, target: Target) -> Iterator[Alternative]:
    """Yields other tokens that places may hold: the tokenizer's own, and the last row."""
    tokenizer: Any = target.tokenizer
    found: list[int | None] = []
    if tokenizer is not None:
        found += [tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)]
    found += [target.vocab_size - 1]
    for token in dict.fromkeys(found):
        if token is not None and 0 <= token < target.vocab_size and token != drafter.mask_token_id:
            yield Alternative(
                f"mask token {token}",
                Mistake.MASK_TOKEN,
                f"give drafter.mask_token_id={token}, or correct mask_token_id in its config.json",
                {"mask_token_id": token},
            )


def _swap_halves(linear: Any) -> None:
    linear.weight.data = linear.weight.data.roll(linear.in_features // 2, dims=1)
