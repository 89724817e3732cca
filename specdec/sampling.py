"""From logits to the distribution that plain sampling would draw from: p for the target, q for a drafter."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from specdec.filters import first_largest, keep_top
from specdec.kernels import usable
from specdec.requests import SamplingParams


@dataclass(frozen=True, eq=False)
class SamplingTensors:
    """The sampling parameters of a batch of rows, and which of them any row uses (known on the host).

    Filters and penalties are 0 or 1 where off, ``temperature`` is 0 where greedy. What begins with ``any_`` holds if
    some active row is so.

    Attributes:
        tables: What is known of every token, as far as a row needs it: which were ``seen`` in prompt or output so far,
            the ``counts`` in the output alone, root included in both; the ``bias`` of logits; and the ``ends``, which
            are forbidden at nodes before the position ``first_end``.
        largest_top_k: The largest top-k of any active row, 0 if none uses it; None if the host does not know it.
    """

    temperature: Float[Tensor, " batch"]
    top_k: Int[Tensor, " batch"]
    top_p: Float[Tensor, " batch"]
    min_p: Float[Tensor, " batch"]
    repetition_penalty: Float[Tensor, " batch"]
    presence_penalty: Float[Tensor, " batch"]
    frequency_penalty: Float[Tensor, " batch"]
    tables: Mapping[str, Shaped[Tensor, "batch vocab"]]
    any_greedy: bool
    any_sampled: bool
    any_filtered: bool  # some active row uses top-k or top-p
    any_min_p: bool
    largest_top_k: int | None = None
    all_top_k: bool = False
    any_top_p: bool = True
    first_end: Int[Tensor, " batch"] | None = None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], **tensors: Any) -> "SamplingTensors":
        """Returns the tensors, by name, together with what the host knows of the requests."""
        sampled = [param for param in params if not param.greedy]
        return cls(
            **tensors,
            any_greedy=len(sampled) < len(params),
            any_sampled=bool(sampled),
            any_filtered=any(each.top_k > 0 or each.top_p < 1 for each in sampled),
            any_min_p=any(each.min_p > 0 for each in sampled),
            largest_top_k=max((each.top_k for each in sampled), default=0),
            all_top_k=all(each.top_k > 0 for each in sampled),
            any_top_p=any(each.top_p < 1 for each in sampled),
        )

    @property
    def flags(self) -> Hashable:
        values = [getattr(self, field.name) for field in fields(self) if field.name != "tables"]
        return tuple("there" if isinstance(value, Tensor) else value for value in (*self.tables, *values))

    @property
    def by_path(self) -> bool:
        """Whether the tokens above a node change its scores."""
        return not self.tables.keys() <= {"bias"}


def forbid_ends(
    scores: Float[Tensor, "batch node vocab"], sampling: SamplingTensors, positions: Int[Tensor, "batch node"]
) -> Float[Tensor, "batch node vocab"]:
    """Returns the scores with -inf for what ends a row too early, unless nothing else is left at a node."""
    if "ends" not in sampling.tables or sampling.first_end is None:
        return scores
    early = (positions < sampling.first_end[:, None])[..., None] & sampling.tables["ends"][:, None]
    going_on = scores.masked_fill(early, -torch.inf)
    return going_on.where((going_on > -torch.inf).any(-1, keepdim=True), scores)


def path_tokens(
    tokens: Int[Tensor, "batch node"], ancestors: Bool[Tensor, "batch query node"]
) -> Int[Tensor, "batch query node"]:
    """Returns the tokens on the path to each queried node, the root's first; -1 padded, also for what is no node."""
    return torch.where(ancestors, tokens[:, None], -1)


def adjust(
    logits: Float[Tensor, "batch node vocab"],
    sampling: SamplingTensors,
    paths: Int[Tensor, "batch node position"] | None = None,
) -> Float[Tensor, "batch node vocab"]:
    """Returns the logits in float32 with bias and penalties, for the sequence so far *and* the path to each node."""
    logits, tables = logits.float(), sampling.tables
    if "bias" in tables:
        logits = logits + tables["bias"][:, None]
    if not sampling.by_path:
        return logits
    assert paths is not None, "rows with a penalty need the tokens of each node's path"
    if "seen" in tables:
        above, factor = paths.where(paths >= 0, paths[..., :1]).clamp(min=0), sampling.repetition_penalty[:, None, None]
        penalized = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(tables["seen"][:, None], penalized, logits)
        logits = logits.scatter(2, above, penalized.gather(2, above))
    if "counts" in tables:
        counts, drafted = tables["counts"][:, None].float().repeat(1, logits.shape[1], 1), paths[..., 1:]
        counts.scatter_add_(2, drafted.clamp(min=0), (drafted >= 0).float())
        logits = logits - sampling.frequency_penalty[:, None, None] * counts
        logits = logits - sampling.presence_penalty[:, None, None] * (counts > 0)
    return logits


def distribution(
    logits: Float[Tensor, "batch node vocab"], sampling: SamplingTensors
) -> Float[Tensor, "batch node vocab"]:
    """Returns the probabilities that temperature, top-k, top-p and min-p, in this order, make of adjusted logits.

    They are float32. A greedy row gets the one-hot argmax. In all ties the lower token id wins.
    """
    if not sampling.any_sampled:
        return one_hot(first_largest(logits), logits.shape[-1])
    if usable(logits):
        from specdec.kernels import sampling as kernel

        filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        return kernel.distribution(
            logits,
            *filters,
            any_top_k=sampling.any_filtered and sampling.largest_top_k != 0,
            any_top_p=sampling.any_filtered and sampling.any_top_p,
            any_min_p=sampling.any_min_p,
        )
    greedy = sampling.temperature == 0
    result = logits.to(torch.float32, copy=True).div_(sampling.temperature.where(~greedy, 1.0)[:, None, None])
    if sampling.any_filtered:
        result = keep_top(
            result,
            sampling.top_k,
            sampling.top_p,
            largest_top_k=sampling.largest_top_k,
            all_top_k=sampling.all_top_k,
            any_top_p=sampling.any_top_p,
        )
    result = result.softmax(-1)
    if sampling.any_min_p:
        result = result.where(result >= sampling.min_p[:, None, None] * result.amax(-1, keepdim=True), 0.0)
        result = result / result.sum(-1, keepdim=True)
    if sampling.any_greedy:
        result = torch.where(greedy[:, None, None], one_hot(first_largest(logits), logits.shape[-1]), result)
    return result


def warmed(sampling: SamplingTensors, rows: Bool[Tensor, " batch"]) -> SamplingTensors:
    """Returns the parameters with the greedy rows among ``rows`` at temperature 1, as greedy cascades need them."""
    temperature = torch.where(rows & (sampling.temperature == 0), 1.0, sampling.temperature)
    return replace(sampling, temperature=temperature, any_sampled=True, all_top_k=False)


def one_hot_argmax(logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """Returns rows with all mass on the largest logit; ties go to the lowest id."""
    return one_hot(first_largest(logits), logits.shape[-1]).to(logits.dtype)


def one_hot(tokens: Int[Tensor, "*rows"], vocab: int) -> Float[Tensor, "*rows vocab"]:
    """Returns rows with all mass on these tokens, in float32."""
    return torch.zeros(*tokens.shape, vocab, device=tokens.device).scatter_(-1, tokens[..., None], 1.0)
