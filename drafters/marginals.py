"""The target's own marginals as drafts: the most that heads which do not see each other's tokens can be taught.

It is an instrument and no method: it runs the target many times per round, so its *speed* is that of no real drafter.
Its tokens per round say how much of what a parallel drafter lacks is due to filling all places at once.
"""

from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafters.heads.last_state import DEFAULT_SHAPE
from drafters.own_model import Drawn, OwnModelDrafter
from specdec import Batch, DraftSampling, ModelRunner, Outcome, Sizes, Target, Topology
from specdec.arguments import flag, number, whole
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.scored import ScoredSession
from specdec.drafting.scorer import Follower, forward_of
from specdec.random import Purpose, draw, uniforms
from specdec.requests import GREEDY_BELOW
from specdec.shape import MOST_NODES

_PAIR = 2  # nodes above the continuations: the last committed token, and the root


class MarginalScorer(Follower):
    """Scores every depth with the average of what the target says after many continuations.

    Its cache holds keys and values of the committed tokens. In a round it forwards the last of them again, with the
    root, and below one of the two a bush of ``samples`` chains, level by level, behind what is committed.
    """

    per_depth, needs_state = True, True
    lookback = 1  # the last token is kept

    def __init__(
        self,
        runner: ModelRunner,
        *,
        samples: int,
        depth: int,
        knows_root: bool,
        temperature: float,
        max_batch_size: int,
    ):
        super().__init__(runner, slots=max_batch_size)
        runner.refuse_states("draft marginals")
        self.max_depth = depth
        self._knows_root, self._temperature = knows_root, temperature
        self._greedy = temperature < GREEDY_BELOW
        self._samples = samples = 1 if self._greedy else samples
        self._unknown = depth - knows_root  # tokens between what is known and the deepest node
        first = [int(knows_root)] * samples if self._unknown else []
        below = range(_PAIR, _PAIR + samples * (self._unknown - 1))
        with torch.inference_mode(False):
            parents = torch.tensor([[-1, 0, *first, *below]], device=runner.device)
            self._stairs = torch.arange(samples, dtype=torch.float64, device=runner.device)
        self._bush = Topology(parents, max_depth=depth, max_children=samples + 1)
        self._pair = Topology.chain(_PAIR, runner.device)

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        before = (batch.lengths - 1).clamp(min=0)  # a row without a token there is not ready
        tokens = torch.stack([self._last_token[batch.slots], batch.roots], dim=1)
        scores = self._scores(batch, before, tokens, self._pair)
        law = self._law(scores[:, 1:] if self._knows_root else scores[:, :1])
        laws = [law[:, 0]] if self._knows_root else []
        for level in range(depth - self._knows_root):
            bush = self._bush.first(_PAIR + self._samples * (level + 1))
            law = self._law(self._scores(batch, before, self._drawn(law, batch, level), bush))
            laws.append(self._average(law))
        return torch.stack(laws, dim=1).log()

    def _average(self, laws: Float[Tensor, "batch sample vocab"]) -> Float[Tensor, "batch vocab"]:
        """Returns a marginal: the mean of distributions, which is less noisy than counts of tokens would be."""
        return laws.mean(dim=1)

    def _law(self, scores: Float[Tensor, "batch some vocab"]) -> Float[Tensor, "batch some vocab"]:
        return (scores.float() if self._greedy else scores.float() / self._temperature).softmax(-1)

    def _drawn(self, law: Float[Tensor, "batch some vocab"], batch: Batch, level: int) -> Int[Tensor, "batch sample"]:
        """Returns every continuation's next token; at the first level each from its own part of the distribution."""
        if self._greedy:
            return law.argmax(-1)
        first = level * self._samples
        # Numbers are counted from the first level on: they must not depend on how deep other rows draft.
        uniform = uniforms(batch.keys, batch.rounds, Purpose.LOOK_AHEAD, first + self._samples)[:, first:]
        if level == 0:
            uniform = (self._stairs + uniform) / self._samples
        return draw(law.expand(-1, self._samples, -1), uniform)

    def _scores(self, batch: Batch, lengths: Tensor, tokens: Int[Tensor, "batch node"], topology: Topology) -> Tensor:
        # The bound was made for a tree of the target's, which is smaller than the bush.
        bound = None if batch.key_bound is None else batch.key_bound + topology.width
        return self.runner.run(forward_of(batch, tokens, topology, lengths, key_bound=bound)).scores

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        self.read(outcome.tokens, outcome.slots, outcome.starts)
        self.keep_last(outcome)


class MarginalDrafter(OwnModelDrafter):
    """Drafts every depth from the target's own marginal there: the law of that token, whatever stands between.

    Let the last committed token stand at position t and the root at t+1. The law of a node of depth d is the
    distribution of the token at t+1+d in text that the target goes on to write, given the tokens up to t alone, which
    is what Medusa's heads predict, or (``knows_root``) up to t+1, as a block drafter without a Markov head can know.

    Among all predictions that read these tokens alone, the marginal has the least cross-entropy on the target's text.
    It is estimated without bias: the target writes ``samples`` continuations in every round, and its next-token
    distributions behind them are averaged. Their random numbers are others than those that draw and accept drafts.

    Args:
        shape: A tree builder, or what ``TreeShape.of`` takes. None is Medusa's.
        samples: Continuations per round. All of them together may have 4,096 tokens.
        knows_root: Whether the root is known.
        text_temperature: Of the continuations, and of the averaged distributions. At 0 there is one continuation, of
            the most probable tokens, and the laws are those behind it at temperature 1.
    """

    def __init__(
        self,
        shape: AnyTree | None = None,
        *,
        samples: int = 64,
        knows_root: bool = False,
        text_temperature: float = 1.0,
        **options: Unpack[Drawn],
    ):
        given: Drawn = {"sampling": DraftSampling.DETERMINISTIC, **options}
        super().__init__(tree_of(DEFAULT_SHAPE if shape is None else shape), name="marginals", **given)
        self.samples = whole("samples", samples, least=1)
        if self.samples * self.max_depth > MOST_NODES:
            raise ValueError(
                f"samples={samples} continuations of {self.max_depth} tokens are {samples * self.max_depth:,} tokens "
                f"and a round may look at {MOST_NODES:,}: give fewer samples, or a shallower tree"
            )
        self.knows_root = flag("knows_root", knows_root)
        remedy = "give a positive number, or 0 for the most probable continuation"
        self.text_temperature = number(
            "text_temperature", text_temperature, remedy, lambda value: 0 <= value < float("inf")
        )

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Allocate a second cache for the target, with room for the continuations."""
        depth = self.max_depth + sizes.leaf_probs
        runner = self.runner_for(target.model, "drafter", sizes, max_nodes=_PAIR + self.samples * depth)
        scorer = MarginalScorer(
            runner,
            samples=self.samples,
            depth=depth,
            knows_root=self.knows_root,
            temperature=self.text_temperature,
            max_batch_size=sizes.max_batch_size,
        )
        return ScoredSession(self, scorer, target, sizes)
