"""Counter-based random numbers: a draw is a pure function of (seed, stream, round, purpose, index).

For noise that drafter and target share, the position takes the place of the round (``shared_noise``). The mixer is the
finalizer of SplitMix64 (Steele, Lea & Flood 2014), applied once to the round's counter and once to each draw's.
"""

import enum
import secrets
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.counting import count_operation
from specdec.kernels import usable
from specdec.native import is_plain, native_library
from specdec.opaque import opaque

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15, as a signed 64-bit integer
_MULTIPLIER_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = -7723592293110705685  # 0x94D049BB133111EB
_BITS = 52  # u <= 1 - 2**-52, so that u * total stays below total in float64


class Purpose(enum.IntEnum):
    """What a draw is for; draws of one round with different purposes are independent."""

    ACCEPT = 0
    DRAFT = 1
    SHARED = 2
    LOOK_AHEAD = 3
    """What a drafter draws to find its distributions, before it draws tokens from them."""


def mix(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Returns a hash of every 64-bit integer; different integers have different hashes."""
    # Torch shifts int64 arithmetically: the masks make the shifts logical.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIER_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIER_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def request_key(seed: int, stream: int) -> int:
    """Returns the 64-bit key of a request's random numbers (signed)."""
    key = _mix_int(_mix_int(seed + _GAMMA) + stream * _GAMMA)
    return key - (1 << 64) if key >> 63 else key


def _mix_int(x: int) -> int:
    """Returns ``mix`` of one Python integer, unsigned."""
    x &= (1 << 64) - 1
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 & ((1 << 64) - 1)
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 & ((1 << 64) - 1)
    return x ^ (x >> 31)


def fresh_seed() -> int:
    """Returns a seed from the operating system, for ``seed=None``."""
    return secrets.randbits(62)


@lru_cache(maxsize=64)
def _counters(purpose: Purpose, count: int, device: torch.device) -> Int[Tensor, " index"]:
    with torch.inference_mode(False):
        index = torch.arange(1, count + 1, device=device)
        return (index + (int(purpose) << 40)) * _GAMMA


def uniforms(
    keys: Int[Tensor, " batch"], rounds: Int[Tensor, " batch"], purpose: Purpose, count: int
) -> Float[Tensor, "batch index"]:
    """Returns ``count`` independent uniform numbers in [0, 1) for every row, in float64."""
    if keys.device.type == "cpu" and is_plain(keys) and native_library() is not None:
        return opaque(_uniforms, keys.contiguous(), rounds.contiguous(), count, int(purpose))
    counters = _counters(purpose, count, keys.device)
    if usable(keys):
        from specdec.kernels import random

        return random.uniforms(keys, rounds, counters, (_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2), _BITS)
    state = mix(keys + rounds * _GAMMA)
    bits = mix(state[:, None] + counters)
    return ((bits >> (64 - _BITS)) & ((1 << _BITS) - 1)).to(torch.float64) * 2.0**-_BITS


def _uniforms(keys: Tensor, rounds: Tensor, count: int, purpose: int) -> Tensor:
    library = native_library()
    assert library is not None, "asked before"
    numbers = torch.empty(len(keys), count, dtype=torch.float64)
    library.uniforms(keys.data_ptr(), rounds.data_ptr(), numbers.data_ptr(), len(keys), count, purpose)
    count_operation("uniforms")
    return numbers


def shared_noise(
    keys: Int[Tensor, " batch"], positions: Int[Tensor, "batch position"], vocab_size: int
) -> Float[Tensor, "batch position vocab"]:
    """Returns a standard exponential number for every token at some positions of a sequence, in float32.

    Only this noise is counted by position and not by round: target and drafter read the same numbers, and the next
    round reads them again. Minus their logarithm is the Gumbel noise of the literature.
    """
    batch, width = positions.shape
    u = uniforms(keys.repeat_interleave(width), positions.flatten(), Purpose.SHARED, vocab_size)
    # Small numbers decide. They keep all their bits, because float32 rounds after the logarithm; none is zero.
    return u.clamp_(min=2.0**-_BITS / 2).neg_().log1p_().neg_().float().view(batch, width, vocab_size)


def draw(weights: Float[Tensor, "*rows choice"], uniform: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """Returns the first index whose cumulative weight exceeds ``uniform`` times the total, computed in float64.

    It is never an index of weight zero, if any weight is positive. Weights need not be normalized.
    """
    return draw_with_total(weights, uniform)[0]


def draw_with_total(
    weights: Float[Tensor, "*rows choice"], uniform: Float[Tensor, "*rows"]
) -> tuple[Int[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """Returns what ``draw`` does, and the total of the weights in float64, which tells whether all are finite."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = uniform[..., None] * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)[..., 0]
    return index.clamp_(max=weights.shape[-1] - 1), cumulative[..., -1]
