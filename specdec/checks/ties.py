"""Could rounding have exchanged two tokens? What a dtype explains at one place of a sequence, measured at that place.

The logits of a place depend a little on how the sequence went through the model: other shapes run other kernels, which
round differently. So two exact methods may part where two logits are nearly equal, and nowhere else. Whether a place is
one of those is measured: the same sequence is fed to the same model in several other pieces, and if the model computes
in 16 bits, once more in float32, which has to confirm it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, PreTrainedModel

from specdec.cache.transformers_cache import cache_argument
from specdec.checks.reference import cache_like, next_state
from specdec.execution.executor import evaluating
from specdec.quantization import quantization_of
from specdec.quantization.base import rounded_to
from specdec.requests import SamplingParams

FACTOR, FLOOR_ULPS = 3.0, 4.0
"""The bound where float32 confirms nothing: so many times the largest measured change, and so many units in the last
place of the largest logit: two for the rounding of two logits, and as many for the layers before."""
ERRORS = 2.0
"""How many times the largest error against float32 goes into the bound, beside the one unit that rounding two logits
can make. SmolLM2-135M in bfloat16, 640 places: of 70 tokens that were not float32's, none needed more than 1."""
SHAKE = 16.0
"""How far numbers are moved before they get their codes in a quantized cache, in ``SHAKEN`` further passes: in units of
the dtype's epsilon, as a fraction of the largest number in their vector."""
SHAKEN = 6
_MASKED = -5e3  # some models write -1e4, -65504 or -inf where a token is never to be chosen: no logit computes so
_HALVES = (torch.bfloat16, torch.float16)
LONGEST_TAIL = 64
"""The most tokens that are fed one by one, or a few at a time."""


@dataclass(frozen=True)
class Tie:
    """How far two tokens are apart at a place, in nats, and how far the dtype explains.

    ``margin`` is how far the lower of the two logits is below the largest one there, None if a token is impossible, in
    float32 where it confirms ties; the ``bound``, which a tie just has to reach, is None without a margin or unasked.
    """

    margin: float | None
    bound: float | None


@torch.inference_mode()
def examine(
    model: PreTrainedModel,
    sequence: Sequence[int],
    tokens: tuple[int, int],
    sampling: SamplingParams,
    *,
    prompt_length: int,
    bounded: bool = True,
    kv_cache: str | None = None,
) -> Tie:
    """Return whether two methods may have parted after ``sequence`` because of rounding.

    The margin is from one forward over the whole sequence, with penalty and processors, and counts from the largest
    logit of all: a wrong token is not excused by a near-tie of two others. The bound is ``FACTOR`` times the largest
    change, from one pass to another, of the difference of any two of the three logits concerned, plus ``FLOOR_ULPS``
    units of the coarsest dtype: the weights', the logits', the one that quantized layers round to, or float32. A model
    of 16 bits without quantized parts runs in float32, too: the margin is that pass's, and the bound at most a unit and
    ``ERRORS`` times the largest error. An engine's own passes do not count: a wrong one would excuse itself.

    Args:
        sequence: Prompt and output up to the place.
        tokens: What the two methods went on with, greedily.
        bounded: False leaves the bound out, which costs a forward instead of many.
        kv_cache: The format in which the engine stores keys and values. The model's passes round to it, too, and passes
            are added in which numbers are moved by ``SHAKE`` before they get their codes.
    """
    whole = _run_model(model, sequence, (), kv_cache)
    wide = None if kv_cache is not None or quantization_of(model) is not None else _run_in_float32(model, sequence)
    _, scores = next_state(whole if wide is None else wide, sequence, sampling, prompt_length=prompt_length)
    watched = [*tokens, int(scores.argmax())]
    margin = float(scores.max() - scores[list(tokens)].min())
    if not math.isfinite(margin):
        return Tie(None, None)
    if not bounded:
        return Tie(margin, None)

    def watch(logits: Tensor) -> np.ndarray:
        _, scores = next_state(logits, sequence, sampling, prompt_length=prompt_length)
        return scores[watched].double().cpu().numpy()

    dtypes = (model.dtype, whole.dtype, torch.float32, rounded_to(model) or torch.float32)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    _, exponent = math.frexp(float(whole[whole > _MASKED].abs().max()))
    unit = eps * 2.0 ** (exponent - 1)

    def others() -> Iterator[Tensor]:
        for cuts in _cuts(len(sequence), prompt_length):
            yield _run_model(model, sequence, cuts, kv_cache)
        for seed in range(SHAKEN if kv_cache is not None else 0):
            shake = SHAKE * torch.finfo(model.dtype).eps
            yield _run_model(model, sequence, (), cache=cache_like(model, kv_cache, shake=shake, seed=seed))

    passes, bound = list[np.ndarray](), 0.0
    for logits in chain((whole,), others()):
        passes.append(watch(logits))
        bound = FACTOR * _largest_change(passes) + FLOOR_ULPS * unit
        if wide is not None:
            bound = min(bound, ERRORS * max(_largest_change((watch(wide), each)) for each in passes) + unit)
        if not bound < margin:  # further passes can only raise it; one of a large model may take half a minute
            break
    return Tie(margin, bound) if math.isfinite(bound) else Tie(None, None)


def _cuts(length: int, prompt_length: int) -> Iterator[tuple[int, ...]]:
    """Yields ways to cut a sequence into pieces: the last few tokens as one piece, and the output in steps.

    Six tokens, four of them the prompt's, are cut at (3, 4, 5) for steps of one token, as plain decoding takes them.
    """
    for last in (1, 2, 4, 8):
        if last < length:
            yield (length - last,)
    start = max(prompt_length - 1, length - LONGEST_TAIL)
    for step in (1, 4):
        if 0 < start < length - 1:
            yield tuple(range(start, length, step))


class _Widened(TorchFunctionMode):
    """Gives every operation float32 for 16 bits, so that nothing is rounded to them; there is no second model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _run_in_float32(model: PreTrainedModel, sequence: Sequence[int]) -> Float[Tensor, " vocab"] | None:
    """The logits of a model of 16 bits in float32; None for others, and where its kernels or the memory refuse."""
    if model.dtype not in _HALVES:
        return None
    try:
        with _Widened():
            return _run_model(model, sequence, ())
    except RuntimeError:
        return None


def _run_model(
    model: PreTrainedModel,
    sequence: Sequence[int],
    cuts: Sequence[int],
    kv_cache: str | None = None,
    *,
    cache: DynamicCache | None = None,
) -> Float[Tensor, " vocab"]:
    """The logits after a sequence that the model itself is fed in pieces, with transformers' cache."""
    parameters = signature(type(model).forward).parameters
    name, options = cache_argument(parameters), {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    past, start = cache_like(model, kv_cache) if cache is None else cache, 0
    logits = torch.empty(0)
    with evaluating([module for module in model.modules() if module.training]):
        for stop in (*cuts, len(sequence)):
            piece = torch.tensor([list(sequence[start:stop])], device=model.device)
            output = model(piece, **{name: past}, use_cache=bool(cuts) or past is not None, **options)
            past, start = getattr(output, name), stop
            logits = output.logits[0, -1]
    return logits


def _largest_change(passes: Sequence[np.ndarray]) -> float:
    """Return how far the difference of any two of the watched logits moves between passes."""
    table = np.stack(passes)
    return float(np.ptp(table[:, :, None] - table[:, None, :], axis=0).max())
