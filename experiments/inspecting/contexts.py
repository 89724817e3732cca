"""Acceptance by length of the context, and the likely cause where it falls.

Prompts are cut from the front, so that all lengths go on from the same places. What is compared are means by prompt,
and prompts are what is drawn again: a cause is named if nearly all draws name it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from scipy import stats
from torch import nn

from experiments.inspecting.acceptance import LEAST, SHARE, Acceptance, play
from specdec.interfaces import Drafter
from specdec.target.target import Target

_CHANCE = 0.01
"""The probability at which what is no fall is called one."""
_DRAWS = 2000
_SURE = 0.9
"""The share of the draws that has to agree."""
_FITS = 0.7
"""The share of the curve's variance that a cause has to explain."""
_FREE = 3.0
"""How much better a course that no limit explains has to fit than one that a limit explains."""
_RISE = 0.1
"""The rise of the target's entropy, as a share of it, from which on the target is the cause."""


class Cause(StrEnum):
    """Why acceptance falls with the length of the context."""

    NONE = "it does not fall"
    WINDOW = "a window that is shorter than the context"
    POSITIONS = "positions beyond the range of its RoPE"
    TRAINING = "texts of its training that are shorter than the context"
    TARGET = "the target itself, which is less certain there"
    UNKNOWN = "none of these"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The lengths that a drafter's files speak of; None where they say nothing.

    Attributes:
        window: The positions that its layers see, where none of them sees everything.
        positions: ``max_position_embeddings``.
        trained: The length of the texts that it was trained on.
    """

    window: int | None = None
    positions: int | None = None
    trained: int | None = None

    @classmethod
    def of(cls, module: nn.Module, trained: int | None = None) -> "Limits":
        """Returns the limits in a head's or a model's configuration, and the given length of its training texts."""
        config: Any = getattr(module, "config", None)
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        window, kinds = getattr(text, "sliding_window", None), set(getattr(text, "layer_types", None) or ["sliding"])
        if getattr(text, "use_sliding_window", True) is False or any("sliding" not in each for each in kinds):
            window = None
        return cls(window=window, positions=getattr(text, "max_position_embeddings", None), trained=trained)


@dataclass(frozen=True, eq=False)
class Curve:
    """Tokens per round by length of the context.

    Attributes:
        lengths: Tokens of the prompts, the shortest first.
        found: The acceptance at each of them.
        limits: The lengths that the drafter's files name.
    """

    lengths: Sequence[int]
    found: Sequence[Acceptance]
    limits: Limits

    @property
    def prompts(self) -> list[int]:
        """The numbers of the prompts that have rounds at every length."""
        return sorted(set.intersection(*(set(each.prompts.tolist()) for each in self.found)))

    @property
    def tokens(self) -> np.ndarray:
        """Expected tokens per round, ``[prompt, length]``."""
        return self._means(lambda each: each.lengths.numpy())

    @property
    def entropies(self) -> np.ndarray:
        """The entropy of the target's next token in nats, likewise: high where it is hard to predict."""
        return self._means(lambda each: each.entropies.numpy())

    def _means(self, values: Callable[[Acceptance], np.ndarray]) -> np.ndarray:
        columns = [(values(each), each.prompts.numpy()) for each in self.found]
        return np.array([[own[of == prompt].mean() for own, of in columns] for prompt in self.prompts])

    def change(self, at: int) -> tuple[float, float]:
        """Returns how many more tokens a round has than at the shortest length, and the standard error over prompts."""
        more = self.tokens[:, at] - self.tokens[:, 0]
        return float(more.mean()), float(more.std(ddof=1) / np.sqrt(len(more))) if len(more) > 1 else float("nan")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The likely cause of a fall.

    Attributes:
        cause: The likeliest.
        sure: Whether it is named; otherwise it cannot be told.
        gap: The neighbouring lengths between which the fall begins.
        fall: Tokens per round that are lost beyond, on average.
        others: The other causes that draws of the prompts would name.
    """

    cause: Cause
    sure: bool
    gap: tuple[int, int]
    fall: float
    others: tuple[Cause, ...] = ()


def play_at(
    drafter: Drafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    limits: Limits,
    *,
    tokens: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Curve:
    """Let the target go on from the same places with contexts of several lengths, one request at a time.

    Args:
        drafter: Drafts chains.
        prompts: Each at least as long as the largest length.
        limits: The lengths that the drafter's files name, by which a cause is named.

    Raises:
        ValueError: There are fewer than two lengths, or three prompts that have drafts at all of them; or a prompt is
            too short; or as ``play``.
    """
    lengths = sorted(set(lengths))
    if len(lengths) < 2 or lengths[0] < 2:
        raise ValueError(f"contexts={lengths}: give two lengths or more, of at least 2 tokens")
    if len(prompts) < 3:
        raise ValueError(f"{len(prompts)} prompts tell no difference from chance: give three or more")
    shortest = min(map(len, prompts))
    if shortest < lengths[-1]:
        raise ValueError(f"a prompt has {shortest} tokens, and contexts={lengths} asks for {lengths[-1]}")
    found = []
    for length in lengths:
        progress(f"{length:,} tokens of context")
        cut = [prompt[-length:] for prompt in prompts]
        found.append(play(target, drafter, cut, tokens=tokens, seed=seed, at_once=1))
    curve = Curve(lengths, found, limits)
    if len(curve.prompts) < 3:
        few = f"of {len(prompts)} prompts, {len(curve.prompts)} have drafts at all of contexts={lengths}"
        raise ValueError(f"{few}, which tells no difference from chance: give more places, or more tokens")
    return curve


def cause_of(curve: Curve, seed: int = 0) -> Explanation:
    """Names the likely cause of a fall by its place and its shape.

    A window that hides what is needed, and positions beyond a range, make a step; where the need is spread evenly, a
    window loses as the hidden share of the context grows. A training that was too short loses with every doubling. A
    target that is harder to predict from there on has more entropy there. One that is wrong without it cannot be told
    from its drafter.
    """
    generator = np.random.default_rng(seed)
    tokens, entropies = curve.tokens, curve.entropies
    drawn = generator.integers(len(tokens), size=(_DRAWS, len(tokens)))
    drawn = np.concatenate([np.arange(len(tokens))[None], drawn])  # the first is no draw: the means themselves
    curves, certain = tokens[drawn].mean(1), entropies[drawn].mean(1)
    shapes = list(_shapes(curve.lengths, curve.limits))
    errors = np.stack([_left(curves, shape) for _, _, shape in shapes])
    # To choose a place at will is a freedom that the limits of files do not have.
    weighed = errors * np.array([_FREE if cause is Cause.UNKNOWN else 1.0 for cause, _, _ in shapes])[:, None]
    cause, gap, shape = shapes[int(weighed[:, 0].argmin())]
    beyond = np.arange(len(curve.lengths)) > gap
    fall, rise = (each[:, ~beyond].mean(1) - each[:, beyond].mean(1) for each in (curves, -certain))
    least = max(LEAST, SHARE * (curves[0, 0] - 1))
    own = tokens[:, ~beyond].mean(1) - tokens[:, beyond].mean(1)
    test: Any = stats.ttest_1samp(own, 0.0, alternative="greater")
    chance = test.pvalue * len(shapes)  # the best of them was chosen
    where: dict[str, Any] = {"gap": (curve.lengths[gap], curve.lengths[gap + 1]), "fall": float(fall[0])}
    if fall[0] < least or chance > _CHANCE:
        return Explanation(cause=Cause.NONE, sure=bool(np.quantile(fall[1:], _SURE) < least), **where)
    # Causes whose shapes are the same at these lengths are equally likely.
    alike = weighed <= weighed.min(0) * (1 + 1e-6) + 1e-12
    named = [{shapes[number][0] for number in np.flatnonzero(column)} for column in alike.T]
    votes = Counter(each for causes in named[1:] for each in causes)
    others = [each for each, count in votes.most_common() if each is not cause and count > (1 - _SURE) * _DRAWS]
    explained = 1 - _left(curves[:1], shape)[0] / max(float(((curves[0] - curves[0].mean()) ** 2).sum()), 1e-12)
    sure = cause is not Cause.UNKNOWN and not others and explained >= _FITS
    more = rise / certain[:, ~beyond].mean(1)
    if np.quantile(more[1:], 1 - _SURE) > _RISE:
        return Explanation(cause=Cause.TARGET, sure=True, **where)
    if more[0] > _RISE / 2 and np.quantile(more[1:], 0.01) > 0:
        others, sure = [*others, Cause.TARGET], False
    return Explanation(cause=cause, sure=bool(sure), others=tuple(others), **where)


def _shapes(lengths: Sequence[int], limits: Limits) -> Iterator[tuple[Cause, int, np.ndarray]]:
    """Yields the courses of a fall: its cause, the gap between lengths in which it begins, and the loss at each."""
    ends = np.array(lengths, dtype=np.float64)
    inside = {}
    for cause, limit in ((Cause.WINDOW, limits.window), (Cause.POSITIONS, limits.positions)):
        if limit is not None and lengths[0] <= limit < lengths[-1]:
            inside.setdefault(_gap(lengths, limit), []).append(cause)
    for gap in range(len(lengths) - 1):
        for cause in inside.get(gap, [Cause.UNKNOWN]):
            yield cause, gap, (np.arange(len(lengths)) > gap).astype(float)
    if limits.window is not None and lengths[0] <= limits.window < lengths[-1]:
        yield Cause.WINDOW, _gap(lengths, limits.window), (1 - limits.window / ends).clip(min=0)
    trained = limits.trained or limits.positions  # which in files of heads often is how long their texts were
    known = None if trained is None or not lengths[0] <= trained < lengths[-1] else trained
    if known is not None:
        yield Cause.TRAINING, _gap(lengths, known), np.log2(ends / known).clip(min=0)
    for gap, length in enumerate(lengths[:-1]):
        if known is None or gap != _gap(lengths, known):
            yield Cause.UNKNOWN, gap, np.log2(ends / length).clip(min=0)


def _gap(lengths: Sequence[int], limit: int) -> int:
    """Returns the number of the last length that a limit allows."""
    return sum(length <= limit for length in lengths) - 1


def _left(curves: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Returns the squares of what is left of curves beside the best multiple of a loss, which is not below zero."""
    centred, own = curves - curves.mean(1, keepdims=True), shape - shape.mean()
    sizes = (-(centred @ own) / (own @ own)).clip(min=0)
    return ((centred + sizes[:, None] * own) ** 2).sum(1)
