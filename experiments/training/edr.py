"""Expected decoding rounds of a text as a loss (EDR, arXiv 2610.10411): a place counts by how often a round meets it.

Along a text of the target's, a chain under rejection sampling accepts the next token with a = min(1, q / p), and if not
begins c rounds. Let V be the rounds that are still to begin. Its derivative at the text's beginning is that of
Σ ω (c + a A) over all places of all drafts, where ω is how often a place is met, and A how many more rounds begin
behind an acceptance than behind a rejection; neither has a gradient.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from drafters.heads.training import Anchors, TextBatch, TrainedHead
from experiments.training.losses import Compared, DraftLoss, Mask, Places, Table

Grid = Shaped[Tensor, "row position *depth"]


class ExpectedRounds(DraftLoss):
    """EDR, for fine-tuning on texts that the target has sampled. Its value is no number of rounds, its gradient is.

    A text is a run of supervised tokens, and ends with it. Drafts at all positions are compared without a gradient
    first; as many as the head would take then get one.
    """

    everywhere = True

    def over(self, drafts: Iterable[Compared], valid: Mask, factors: Tensor | None) -> Table:
        assert factors is not None
        pairs = zip(drafts, factors.unbind(1), strict=True)
        return torch.stack([own[:, 0] * each.cost + own[:, 1] * each.accepted for each, own in pairs], 1)


def everywhere(head: TrainedHead, batch: TextBatch, own: Anchors) -> Iterator[Anchors]:
    """All anchors of a batch, in parts with as many in every row as ``own`` has at most; some predict nothing."""
    every, (rows, length) = Anchors.everywhere(batch, head.depths, before=head.before), batch.tokens.shape
    row = every.index // length
    rank = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
    count = max(1, int((own.index // length).bincount(minlength=rows).max()))
    for part in (rank // count).unique():
        inside = rank // count == part
        some = every.index[inside], every.valid[inside], every.valid[inside]
        yield Anchors(*some).sampled(batch, count, torch.Generator())


def drawn(found: Sequence[Places], batch: TextBatch, own: Anchors) -> tuple[Anchors, Float[Tensor, "anchor depth 2"]]:
    """Anchors that are drawn by how often a round begins there, and the factors of c and a: ω / π and ω A / π.

    Every row gets as many as ``own`` has in it, by a systematic draw with probabilities π = min(1, λ d), where d is the
    number of rounds that begin at an anchor. On average their loss is that of all anchors, whose places are ``found``.
    """
    rows, length = batch.tokens.shape

    def spread(values: Sequence[Tensor]) -> Grid:
        whole = torch.zeros(rows * length, own.valid.shape[1], dtype=torch.float64)
        for places, each in zip(found, values, strict=True):
            there = places.anchors.valid[:, 0]
            whole[places.anchors.index[there].cpu()] = each[there].double().cpu()
        return whole.unflatten(0, (rows, length))

    valid, accepted = spread([each.anchors.valid for each in found]).bool(), [each.ratio.clamp(max=1) for each in found]
    _, begun, met, advantage = occupied(spread([each.cost for each in found]), spread(accepted), valid)
    counts = (own.index.cpu() // length).bincount(minlength=rows)[:, None]
    left = begun.sort(1).values.cumsum(1).flip(1)  # λ is the largest of those with which the first so many are sure
    scale = ((counts - torch.arange(length)) / left).where(left > 0, 0.0).amax(1, keepdim=True)
    chance = (scale * begun).clamp(max=1)
    ticks = chance.cumsum(1) + torch.rand(rows, 1, dtype=torch.float64)
    chosen = ticks.floor() > (ticks - chance).floor()
    # Others fill rows up, and count for nothing.
    order = (2 - chosen.int() - valid[..., 0].int()).argsort(dim=1, stable=True)
    taken = torch.zeros_like(chosen).scatter(1, order, torch.arange(length) < counts).flatten()
    weight = (met / chance[..., None]).where(chosen[..., None], 0.0)
    factors = torch.stack([weight, weight * advantage], -1).flatten(0, 1)[taken]
    index, valid = taken.nonzero()[:, 0].to(own.index.device), valid.flatten(0, 1)[taken].to(own.index.device)
    return Anchors(index, valid, valid), factors.to(index.device, torch.float32)


def occupied(cost: Grid, accepted: Grid, valid: Grid) -> tuple[Grid, Grid, Grid, Grid]:
    """Returns V and d at every position, ω and A at every place.

    With c = 0.2 and a = 0.5 everywhere, drafts of two tokens and a text of three tokens and its end, V is 0.8 at the
    beginning, and d is 1, 0.5, 0.5, 0.625.
    """
    (_, length, depths), root = cost.shape, valid[..., 0]
    behind = F.pad(root, (0, depths + 1))[:, 1:].unfold(1, depths + 1, 1)
    inner = valid & behind[..., :-1]  # neither beyond the text nor its last token, behind which no round begins
    cost, onward, stopped = cost * inner, accepted * inner, (1 - accepted) * inner
    value, advantage = F.pad(torch.zeros_like(cost[..., 0]), (0, depths + 1)), torch.zeros_like(cost)
    begun, met = F.pad((root & ~F.pad(root, (1, 0))[:, :-1]).to(cost), (0, depths + 1)), torch.zeros_like(cost)
    for n in reversed(range(length)):
        left = behind[:, n, -1] * (1 + value[:, n + depths + 1])
        for k in reversed(range(depths)):
            advantage[:, n, k] = left - value[:, n + k + 1]
            left = cost[:, n, k] + onward[:, n, k] * left + stopped[:, n, k] * value[:, n + k + 1]
        value[:, n] = left
    for n in range(length):
        mass = begun[:, n]
        for k in range(depths):
            met[:, n, k] = mass * inner[:, n, k]
            begun[:, n + k + 1] += mass * stopped[:, n, k]
            mass = mass * onward[:, n, k]
        begun[:, n + depths + 1] += mass * behind[:, n, -1]
    return value[:, :length], begun[:, :length], met, advantage
