"""Drafts that are accepted as often as you say: the target's own continuation, with mistakes put in on purpose.

It takes the quality of drafts out of a measurement. With it one can see what an engine makes of a given acceptance, and
compare that with what the costs of a round predict. The output is the target's as with any drafter; the *speed* is that
of no real method, because the drafter knows the answer beforehand.
"""

import time
from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.arguments import number, whole
from specdec.batch import Batch
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Session, Sizes
from specdec.random import Purpose, uniforms
from specdec.requests import SamplingParams
from specdec.shape import MOST_NODES
from specdec.target.target import Target
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling


class SyntheticDrafter(Drafter):
    """Drafts a chain of the target's greedy continuation, in which every token is wrong with a given probability.

    For a greedy request, the token at a position is accepted with the probability given for it, if all before it were.
    A wrong token is another one than the target's, so it is always rejected. Which tokens are wrong depends on the
    request's random numbers and nothing else. For a sampled request the drafts are the same; they are accepted as often
    as the target draws its most probable token, and mean little once the output has left the greedy one.

    A prompt whose continuation is not known (``learn``) is decoded plainly when its request is admitted, by an engine
    of the drafter's own, and remembered. This takes the time and the memory of plain decoding: for a measurement, let
    every prompt be decoded once before, in a warm-up.

    Args:
        accept: The probability that a draft is right: one for all positions, or one for each.
        depth: Tokens per draft; None for as many as ``accept`` has probabilities.
        cost: Seconds that the host waits in every round, as if drafting took that long.

    Raises:
        ValueError: A probability is none, their number is not ``depth``, or another argument is out of its range.
    """

    laws = frozenset([DraftSampling.DETERMINISTIC])
    is_chain = True

    def __init__(self, accept: float | Sequence[float] = 0.8, depth: int | None = 4, *, cost: float = 0.0):
        self.accept = _probabilities(accept, depth)
        remedy = "give the seconds that drafting takes in a round, at least 0 and below 60"
        self.cost = number("cost", cost, remedy, lambda seconds: 0 <= seconds < 60)
        self.max_nodes = self.max_depth = len(self.accept)
        self.learned: dict[tuple[int, ...], tuple[int, ...]] = {}

    def bind(self, target: Target, sizes: Sizes) -> "SyntheticSession":
        """Make room for what follows in every slot."""
        return SyntheticSession(self, target, sizes)

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Remember what follows a prompt, in place of what plain decoding says.

        Where rounding lets a forward of one token and one of several choose differently (bfloat16), the output of a
        speculative run predicts the next such run better than plain decoding does.
        """
        self.learned[tuple(prompt)] = tuple(output)


class SyntheticSession(Session):
    """The continuation of each running prompt, in one engine."""

    lookback = 0

    def __init__(self, drafter: SyntheticDrafter, target: Target, sizes: Sizes):
        self._drafter, self._target, self._max_length = drafter, target, sizes.max_length
        self._plain: dict[tuple[tuple[int, ...], float], tuple[int, ...]] = {}
        self._engine: Engine | None = None
        self._shape = TreeShape.chain(drafter.max_depth)
        device, width = target.device, sizes.max_length + drafter.max_depth + 1
        with torch.inference_mode(False):  # written in both modes
            self._sequences = torch.full((sizes.max_batch_size, width), -1, device=device)
            self._steps = torch.arange(1, drafter.max_depth + 1, device=device)
            self._accept = torch.tensor(drafter.accept, dtype=torch.float64, device=device)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Find what follows this prompt. Nothing is drafted where nothing is known to follow."""
        prompt = tuple(prompt_ids)
        output = self._drafter.learned.get(prompt) or self._decoded(prompt, sampling)
        row = torch.full((self._sequences.shape[1],), -1)
        known = torch.tensor([*prompt, *output])[: len(row)]
        row[: len(known)] = known
        self._sequences[slot] = row.to(self._sequences.device, non_blocking=True)

    def prepare(self, batch: Batch) -> Hashable:
        """Wait as long as drafting is to take."""
        if self._drafter.cost:
            _wait(self._drafter.cost)
        return None

    def propose(self, batch: Batch) -> DraftTree:
        """Look up what follows, and put the mistakes in."""
        places = (batch.lengths[:, None] + self._steps).clamp(max=self._sequences.shape[1] - 1)
        follows: Int[Tensor, "batch depth"] = self._sequences[batch.slots[:, None], places]
        wrong = uniforms(batch.keys, batch.rounds, Purpose.DRAFT, self._shape.max_depth) >= self._accept
        drafted = torch.where(wrong, follows + 1, follows) % batch.vocab_size
        known = (follows >= 0) & (self._steps <= batch.max_depth[:, None]) & batch.drafting[:, None]
        return DraftTree.from_shape(
            self._shape,
            torch.cat([batch.roots[:, None], drafted], dim=1),
            valid=torch.cat([torch.ones_like(known[:, :1]), known], dim=1),
        )

    def _decoded(self, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
        """Returns the target's greedy continuation, decoded if it is not known yet.

        It goes on behind EOS and stops, which end a request's output anyway. Logits processors are left out: they may
        keep a state, which a second decoding would change.
        """
        penalty, wanted = sampling.repetition_penalty, sampling.max_new_tokens
        known = self._plain.get((prompt, penalty), ())
        if len(known) < wanted:
            if self._engine is None:
                self._engine = Engine(self._target, max_length=self._max_length)
            asked = SamplingParams(max_new_tokens=wanted, repetition_penalty=penalty, ignore_eos=True)
            known = self._plain[prompt, penalty] = self._engine.generate([list(prompt)], asked)[0].token_ids
        return known


def _probabilities(accept: float | Sequence[float], depth: int | None) -> tuple[float, ...]:
    """Returns one probability per position."""

    def rate(value: object) -> float:
        remedy = "give a probability from 0 to 1, or a list with one for each position"
        return number("accept", value, remedy, lambda given: 0 <= given <= 1)

    if isinstance(accept, Sequence) and not isinstance(accept, str):
        rates = tuple(map(rate, accept))
        if depth is not None and whole("depth", depth) != len(rates):
            raise ValueError(
                f"depth={depth} and accept has {len(rates)} probabilities: give one for each position, or depth=None"
            )
    elif depth is None:
        raise ValueError(f"depth=None and accept={accept}: give the number of tokens that a draft has")
    else:
        rates = (rate(accept),) * whole("depth", depth, least=1)
    if not 0 < len(rates) <= MOST_NODES:
        raise ValueError(f"accept has {len(rates):,} probabilities: give from 1 to {MOST_NODES:,}")
    return rates


def _wait(seconds: float) -> None:
    """Keep the host busy: sleeping is too coarse for milliseconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
