"""The likeliest mistakes in loading a drafter, by its own description: each alternative is tried."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from experiments.inspecting.acceptance import Acceptance, Gain, gain, play
from specdec.interfaces import Description, Drafter
from specdec.target.target import Target


class Mistake(StrEnum):
    """A common mistake in a drafter that loads and drafts badly."""

    LAYERS = "wrong hidden layers"
    NORM = "a wrong norm"
    ROPE = "another rotary embedding"
    MASK_TOKEN = "the wrong mask token"


@dataclass(frozen=True)
class Alternative:
    """Another way to load a drafter: its settings that differ, or an ``edit`` in place of what it is in doubt about."""

    name: str
    mistake: Mistake
    remedy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Mapping[str, Any]], object] | None = None


def check_one_model(drafter: Description) -> None:
    """Refuse a drafter without a trained model, or with several."""
    if len(drafter.parts) != 1:
        raise ValueError(
            f"{drafter.kind} is not one trained model, so there is nothing to inspect: give a head or a small model "
            f"(of a combination its parts, one by one)"
        )


def alternatives(drafter: Description, target: Target, given: Collection[str] = ()) -> Iterator[Alternative]:
    """The likeliest other ways to load a drafter: without the settings that were ``given``, and by its doubts."""
    for name, mistake in (("hidden_layers", Mistake.LAYERS), ("mask_token_id", Mistake.MASK_TOKEN)):
        if name in given:
            yield Alternative(f"{name} of its own files", mistake, f"leave out drafter.{name}", {name: None})
    for subject, value in drafter.doubts.items():
        yield from _OPPOSITES[subject](value, target)


def _layers(layers: Sequence[int] | None, target: Target) -> Iterator[Alternative]:
    """Other hidden states: the neighbours, the usual three, and in another order."""
    count, layers = target.num_layers or 0, tuple(layers or ())
    lists = [tuple(layer if layer < 0 else layer + shift for layer in layers) for shift in (1, -1)]
    if count >= 7 and len(layers) == 3:
        lists.append((2, count // 2, count - 3))
    lists += [tuple(sorted(layers)), tuple(reversed(layers))]
    for other in dict.fromkeys(lists):
        if other != layers and all(-1 <= layer < count for layer in other):
            shown = "[" + ",".join(map(str, other)) + "]"
            remedy = f"give 'drafter.hidden_layers={shown}', or correct the layer ids in its config.json"
            yield Alternative(f"hidden states {shown}", Mistake.LAYERS, remedy, {"hidden_layers": list(other)})


def _masks(mask: int, target: Target) -> Iterator[Alternative]:
    """Other tokens that places may hold: the tokenizer's own, and the last row."""
    tokenizer: Any = target.tokenizer
    tokens: list[int | None] = []
    if tokenizer is not None:
        tokens += [tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)]
    for token in dict.fromkeys([*tokens, target.vocab_size - 1]):
        if token is not None and 0 <= token < target.vocab_size and token != mask:
            remedy = f"give drafter.mask_token_id={token}, or correct mask_token_id in its config.json"
            yield Alternative(f"mask token {token}", Mistake.MASK_TOKEN, remedy, {"mask_token_id": token})


def _residual(layer: Any, target: Target) -> Iterator[Alternative]:
    before = not layer.norm_before_residual
    yield Alternative(
        f"the residual stream begins {'normed' if before else 'un-normed'}",
        Mistake.NORM,
        f"write 'norm_before_residual: {str(before).lower()}' into its config.json (and specdec.json)",
        edit=lambda doubts: setattr(doubts["residual"], "norm_before_residual", before),
    )


def _rope(config: Any, target: Target) -> Iterator[Alternative]:
    """The target's rotary embedding, where the head's is another."""
    text: Any = target.model.config.get_text_config(decoder=True)
    own, theirs = (dict(getattr(each, "rope_parameters", None) or {}) for each in (config, text))
    if "rope_theta" not in own or "rope_theta" not in theirs or own == theirs:
        return

    def edit(doubts: Mapping[str, Any]) -> None:
        head = doubts["rope"]
        head.config.rope_parameters = theirs
        head.model.rotary_emb = type(head.model.rotary_emb)(head.config)

    remedy = f"write 'rope_theta: {theirs['rope_theta']:g}' into its config.json"
    if theirs.get("rope_type", "default") != "default":
        remedy = "copy rope_parameters from the target's config.json into its config.json"
    yield Alternative(f"RoPE of theta {theirs['rope_theta']:,.0f} (the target's)", Mistake.ROPE, remedy, edit=edit)


def _state(state: str, target: Target) -> Iterator[Alternative]:
    other = {"before_norm": "after_norm", "after_norm": "before_norm"}[state]
    name = f"the last state {other.replace('_', ' the final ')}"
    yield Alternative(name, Mistake.NORM, f"give drafter.hidden_state={other}", {"hidden_state": other})


_OPPOSITES: Mapping[str, Callable[[Any, Target], Iterator[Alternative]]] = {
    "layers": _layers,
    "mask": _masks,
    "residual": _residual,
    "rope": lambda head, target: _rope(head.config, target),
    "state": _state,
}
"""By the subject of a doubt: what to try instead."""


ABOVE_UNIGRAM = 0.05
"""Minimum acceptance at depth 1 above the unigram baseline for a head to count as trained."""


class Tried(NamedTuple):
    """An alternative, and what it brings."""

    alternative: Alternative
    acceptance: Acceptance
    gain: Gain


@dataclass(frozen=True, eq=False)
class Inspection:
    """A drafter, what is accepted of it as ``loaded``, and by alternatives.

    Those that were ``tried`` come best first; ``refused`` says why the drafter or the target did not take others.
    """

    drafter: Description
    loaded: Acceptance
    tried: Sequence[Tried]
    refused: Mapping[str, str]

    @property
    def mistake(self) -> Tried | None:
        """The alternative that explains bad figures; None if there is none."""
        least = self.loaded.unigram + ABOVE_UNIGRAM
        return next((each for each in self.tried if each.gain.counts and each.acceptance.acceptance[0] > least), None)

    @property
    def knows_nothing(self) -> bool:
        """It predicts no more than token frequencies do, whatever is tried."""
        return self.mistake is None and self.loaded.acceptance[0] <= self.loaded.unigram + ABOVE_UNIGRAM


def inspect(
    make: Callable[[Mapping[str, Any]], Drafter],
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    seed: int = 0,
    given: Collection[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Inspection:
    """Play rounds with a drafter of chains, and with it loaded in other ways; ``make`` loads it with changed settings.

    Raises:
        ValueError: The drafter does not fit the target, or drafts trees.
    """
    drafter = make({})
    described = drafter.describe(target)
    progress("as loaded")
    loaded = play(target, drafter, prompts, tokens=tokens, seed=seed)
    tried: list[Tried] = []
    refused: dict[str, str] = {}
    for alternative in alternatives(described, target, given):
        progress(alternative.name)
        try:
            other = make(alternative.settings)
            if alternative.edit is not None:
                alternative.edit(other.describe(target).doubts)
            acceptance = play(target, other, prompts, tokens=tokens, seed=seed)
        except ValueError as error:
            refused[alternative.name] = str(error)
            continue
        tried.append(Tried(alternative, acceptance, gain(acceptance, loaded)))
    return Inspection(described, loaded, sorted(tried, key=lambda each: -each.gain.tokens), refused)
