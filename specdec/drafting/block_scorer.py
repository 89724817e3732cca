"""A block drafter's head as a scorer: one forward fills all places, and a tree is grown over what they say."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import Follower, forward_of
from specdec.forward import Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import Outcome

Condition = Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
"""A place's logits behind tokens: ``(its own logits, tokens, their depth, hidden, state) -> (logits, state below)``."""
Prepare = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""What ``Condition`` takes: ``(hidden states of a block, tokens before its roots) -> (hidden, first state)``."""
Refine = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""A block's logits made better as a whole: ``(logits, hidden states, roots, tokens before them) -> logits``."""
Confidence = Callable[[Tensor, Tensor], Tensor]
"""How likely a place's token is to be accepted: ``(tokens before, hidden) -> probability``."""
_READS_NOTHING = 1  # positions that attention reads in a forward of context, which has no attention


class BlockScorer(Follower):
    """Scores with a head that reads the target's hidden states into its cache and fills a block of places at once.

    Its cache holds committed positions alone; a block stands behind them during the round.

    Args:
        block: The places that each place of a block sees.
        shifted: Whether every place, the root's too, predicts the next token; else its own.
        layers: The target's hidden states that make up the context, in their order.
        last_state: The number of the head's hidden state that the logits are computed from.
        to_head: Turns the target's token ids into rows of the head's embeddings.
        embed: The embeddings of a block's tokens, for a head that is given these; None gives it tokens.
        state_width: Width of the state that ``condition`` passes down a path; 0 for none.
        slots_before: Slots whose token before the root is kept, 0 if nobody reads it.
        version: The version of all modules that are called besides.
    """

    cheap_levels = True

    def __init__(
        self, runner: ModelRunner, *, block: Topology, shifted: bool, mask_token: int, layers: Sequence[int],
        last_state: int, max_shown: int, to_head: Callable[[Tensor], Tensor] = lambda tokens: tokens,
        embed: Callable[[Tensor], Tensor] | None = None, condition: Condition | None = None, state_width: int = 0,
        prepare: Prepare | None = None, refine: Refine | None = None, slots_before: int = 0,
        confidence: Confidence | None = None, version: Callable[[], Hashable] = lambda: None,
    ):  # fmt: skip
        super().__init__(runner, slots=slots_before)
        self.per_depth, places = condition is None, block.width
        self._tokens = self.max_depth = places if shifted else places - 1
        self._layers, self._max_shown, self._to_head = tuple(layers), max_shown, to_head
        self._topology = block
        self._embed, self._condition, self._prepare, self._state_width = embed, condition, prepare, state_width
        self._refine, self._confidence, self._version = refine, confidence, version
        self.has_confidence = confidence is not None
        self.lookback = min(slots_before, 1)
        watched = any(each is not None for each in (prepare, refine, confidence))
        self._last_state = last_state if watched else None
        self._wants = Wants(logits=self._tokens, hidden_layers=(last_state,) if watched else ())
        with torch.inference_mode(False):
            self._masks = torch.full((1, places - 1), mask_token, dtype=torch.long, device=runner.device)

    def prepare(self, batch: Batch) -> Hashable:
        return self.runner.version, self._version()

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        if self.lookback:
            self.keep_last(outcome)
        states = torch.cat([outcome.hidden_states[layer] for layer in self._layers], dim=-1)
        features = states.to(self.runner.facts.dtype)
        self.read(outcome.tokens, outcome.slots, outcome.starts, key_bound=_READS_NOTHING, features=features)

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        width = self._topology.width
        tokens = torch.cat([self._to_head(batch.roots)[:, None], self._masks.expand(len(batch), -1)], dim=1)
        # A block may be longer than the tree that the bound was made for.
        bound = None if batch.key_bound is None else batch.key_bound + width
        more = {} if self._embed is None else {"tokens": None, "embeds": self._embed(tokens)}
        given = forward_of(batch, tokens, self._topology, key_bound=bound, wants=self._wants)
        output = self.runner.run(replace(given, **more))
        self._logits, first, before = output.scores, None, None
        self._hidden = self._known = None
        if self.lookback:  # a root without anything before it stands for that
            before = self._last_token[batch.slots].where(batch.lengths > 0, batch.roots)
        if self._last_state is not None:
            hidden = output.hidden_states[self._last_state]
            self._hidden = hidden[:, width - self._tokens :]
            if self._prepare is not None:
                self._known, first = self._prepare(hidden, before)
            if self._refine is not None:
                self._logits = self._refine(self._logits, hidden, batch.roots, before)
        if self._state_width:
            size = len(batch), self._max_shown + 1, self._state_width
            self._states = torch.zeros(size, dtype=self._logits.dtype, device=batch.device)
            if first is not None:
                self._states[:, 0] = first
        return self._conditioned(batch.roots[:, None], 0, first=0, parents=None)

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Tensor:
        count = tokens.shape[1]
        parents = topology.parents[:, topology.width - count :] if self._state_width else None
        return self._conditioned(tokens, depth, first=topology.width - count, parents=parents)

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        self.root_logits(batch)
        return self._logits[:, :depth]

    def confidence(self, tokens: Int[Tensor, "batch node"], depth: int) -> Float[Tensor, "batch node"] | None:
        if self._confidence is None or self._hidden is None:
            return None
        hidden = self._hidden[:, depth : depth + 1].expand(-1, tokens.shape[1], -1)
        return self._confidence(tokens, hidden)

    def _conditioned(
        self, tokens: Int[Tensor, "batch node"], depth: int, *, first: int, parents: Tensor | None
    ) -> Float[Tensor, "batch some vocab"]:
        logits = self._logits[:, depth : depth + 1]
        if self._condition is None:
            return logits
        hidden, state = None, None
        if self._known is not None:
            hidden = self._known[:, depth : depth + 1].expand(-1, tokens.shape[1], -1)
        if parents is not None:
            above = parents[:, :, None].expand(len(tokens), -1, self._state_width)
            state = self._states.gather(1, above)
        elif self._state_width:
            state = self._states[:, :1]
        found, below = self._condition(logits, tokens, depth, hidden, state)
        if below is not None:
            self._states[:, first : first + tokens.shape[1]] = below
        return found
