"""Could rounding have exchanged two tokens? What a dtype explains at one place of a sequence, measured at that place.

The logits of a place depend a little on how the sequence went through the model: other shapes run other kernels, which
round differently. So two exact methods may part where two logits are nearly equal, and nowhere else. Whether a place is
one of those is measured: the same sequence is fed to the same model in several other pieces.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec.cache.transformers_cache import cache_argument
from specdec.checks.reference import cache_like, next_scores
from specdec.execution.executor import evaluating
from specdec.forward import ForwardBatch, Wants
from specdec.quantization.base import rounded_to
from specdec.requests import SamplingParams
from specdec.target.facts import make_cache
from specdec.target.runner import ModelRunner
from specdec.topology import Topology

FACTOR = 3.0
"""How many times the largest measured change goes into the bound: a few passes do not find the worst case. This allows
for eight standard deviations. Of 299 divergences of the bundled models in bfloat16, the worst had half of its bound."""
FLOOR_ULPS = 4.0
"""The part of the bound without any measured change, in units in the last place of the largest logit: two for the
rounding of two logits, and as many for the layers before."""
RUNNER_AT_MOST = 2.0
"""The engine's passes widen the model's own bound so many times at most: a wrong engine must not excuse itself."""
SHAKE = 16.0
"""How far numbers are moved before they get their codes in a quantized cache, in ``SHAKEN`` further passes: in units of
the dtype's epsilon, as a fraction of the largest number in their vector."""
SHAKEN = 6
_MASKED = -5e3  # some models write -1e4, -65504 or -inf where a token is never to be chosen: no logit computes so
LONGEST_TAIL = 64
"""The most tokens that are fed one by one, or a few at a time."""


@dataclass(frozen=True)
class Tie:
    """How far two tokens are apart at a place, in nats, and how far the dtype explains.

    ``margin`` is how far the lower of the two logits is below the largest one there, None if a token is impossible; the
    ``bound`` is None without a margin, or if none was asked for.
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
    runner: ModelRunner | None = None,
    bounded: bool = True,
    kv_cache: str | None = None,
) -> Tie:
    """Return whether two methods may have parted after ``sequence`` because of rounding.

    The margin is from one forward over the whole sequence, with penalty and processors, and counts from the largest
    logit of all: a wrong token is not excused by a near-tie of two others. The bound is ``FACTOR`` times the largest
    change, from one pass to another, of the difference of any two of the three logits concerned, plus ``FLOOR_ULPS``
    units of the coarsest dtype: the weights', the logits', the one that quantized layers round to, or float32. Passes
    of the engine's own runner count up to ``RUNNER_AT_MOST``, and are made where they decide.

    Args:
        sequence: Prompt and output up to the place.
        tokens: What the two methods went on with, greedily.
        runner: The engine's; None leaves its passes out.
        bounded: False leaves the bound out, which costs a forward instead of many.
        kv_cache: The format in which the engine stores keys and values. The model's passes round to it, too, and passes
            are added in which numbers are moved by ``SHAKE`` before they get their codes.
    """
    whole = _run_model(model, sequence, (), kv_cache)
    scores = next_scores(whole, sequence, sampling)
    watched = [*tokens, int(scores.argmax())]
    margin = float(scores.max() - scores[list(tokens)].min())
    if not math.isfinite(margin):
        return Tie(None, None)
    if not bounded:
        return Tie(margin, None)

    def watch(logits: Tensor) -> np.ndarray:
        return next_scores(logits, sequence, sampling)[watched].double().cpu().numpy()

    dtypes = (model.dtype, whole.dtype, torch.float32, rounded_to(model) or torch.float32)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    _, exponent = math.frexp(float(whole[whole > _MASKED].abs().max()))
    floor = FLOOR_ULPS * eps * 2.0 ** (exponent - 1)
    passes = [watch(whole)]
    passes += [watch(_run_model(model, sequence, cuts, kv_cache)) for cuts in _cuts(len(sequence), prompt_length)]
    if kv_cache is not None:
        shake = SHAKE * torch.finfo(model.dtype).eps
        caches = (cache_like(model, kv_cache, shake=shake, seed=seed) for seed in range(SHAKEN))
        passes += [watch(_run_model(model, sequence, (), cache=cache)) for cache in caches]
    bound = FACTOR * _largest_change(passes) + floor
    # Elsewhere they could not change what the margin is judged to be.
    if runner is not None and bound < margin <= RUNNER_AT_MOST * bound:
        passes += [watch(_run_runner(runner, sequence, cuts)) for cuts in _cuts(len(sequence), prompt_length)]
        bound = min(FACTOR * _largest_change(passes) + floor, RUNNER_AT_MOST * bound)
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


def _run_runner(runner: ModelRunner, sequence: Sequence[int], cuts: Sequence[int]) -> Float[Tensor, " vocab"]:
    """The logits after a sequence that a runner is fed in pieces, with a copy in every slot as in a batch."""
    rows, start = runner.cache.slots, 0
    cache = make_cache(
        runner.facts, max_batch_size=rows, max_length=len(sequence), max_nodes=0, kv_cache=runner.kv_cache
    )
    logits = torch.empty(0)
    for stop in (*cuts, len(sequence)):
        piece = torch.tensor([list(sequence[start:stop])] * rows, device=runner.device)
        batch = ForwardBatch(
            tokens=piece,
            slots=torch.arange(rows, device=runner.device),
            lengths=torch.full((rows,), start, device=runner.device),
            topology=Topology.chain(stop - start, runner.device),
            wants=Wants(logits=1),
            counts=np.full(rows, stop - start),
        )
        start, logits = stop, runner.run(batch, cache).scores[0, -1].clone()
    return logits


def _largest_change(passes: Sequence[np.ndarray]) -> float:
    """Return how far the difference of any two of the watched logits moves between passes."""
    table = np.stack(passes)
    return float(np.ptp(table[:, :, None] - table[:, None, :], axis=0).max())
