"""The types that travel along the main path, one per arrow of the loop.

Axis names, used in every annotation: ``batch node depth position vocab layer head head_dim``.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class DraftSampling(enum.IntEnum):
    """How a drafted token was chosen among its siblings; it decides which acceptance rules are exact."""

    DETERMINISTIC = 0
    """Chosen without randomness (n-gram, top-k, Medusa): no draft distribution; siblings are distinct."""
    IID = 1
    """An independent draw from the parent's row of ``draft_probs``."""
    WITHOUT_REPLACEMENT = 2
    """A draw from the parent's row of ``draft_probs`` renormalized over what earlier siblings left."""
    COUPLED = 3
    """The tokens that win under q with the noise of the target's own draw. They are distinct, and no q is needed."""


class Noise(enum.Enum):
    """The randomness behind a token of the output."""

    FRESH = "fresh"
    """New numbers in every round: the output follows the target, and which output it is depends on the drafts."""
    SHARED = "shared"
    """The numbers belong to the token's position, and drafters may look at them: the output depends on target and seed
    alone."""


class Exactness(enum.Enum):
    """What a verifier promises about the output distribution."""

    EXACT = "exact"
    """It is the target's."""
    EXACT_WRT = "exact with respect to another distribution"
    """It is a stated distribution other than the target's."""
    LOSSY = "lossy"
    """Neither is promised."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the acceptance of one round decided.

    Attributes:
        path: Indices of the accepted nodes from the root's child downwards, -1 padded. The root is left out.
        num_accepted: Length of the path.
        expected_accepted: The expected length of the path, given this draft tree.
        next_token: The recovered or bonus token that follows the path.
        valid: False where the laws were not finite (because of NaN logits, say); nothing else in the row means anything
            then.
    """

    path: Int[Tensor, "batch depth"]
    num_accepted: Int[Tensor, " batch"]
    expected_accepted: Float[Tensor, " batch"]
    next_token: Int[Tensor, " batch"]
    valid: Bool[Tensor, " batch"]


@dataclass(frozen=True, eq=False)
class Committed:
    """Tokens that became final: their keys and values are in the target's cache now.

    After a prefill chunk the tokens are a piece of the prompt; after a round they are the root and the accepted path.
    Rows are those of requests that speculate, in any order of slots.

    Attributes:
        slots: The slot of every row.
        host_slots: The same on the host.
        tokens: The committed tokens, in order of position; padding follows after ``counts`` of them.
        starts: The position of each row's first token. On the host.
        counts: The number of tokens in each row, at least 1. On the host.
        next_tokens: The token that follows the last one (known, but not in the cache): pairs
            (hidden state at t, token t+1) are complete.
        path: After a round, the accepted nodes (-1 padded, root left out) in the tree that was proposed; None
            after a prefill chunk.
        hidden_states: Hidden states at the committed positions, by layer index.
    """

    slots: Int[Tensor, " batch"]
    host_slots: np.ndarray
    tokens: Int[Tensor, "batch position"]
    starts: np.ndarray
    counts: np.ndarray
    next_tokens: Int[Tensor, " batch"]
    path: Int[Tensor, "batch depth"] | None
    hidden_states: Mapping[int, Float[Tensor, "batch position hidden"]]

    def rows(self, rows: np.ndarray) -> "Committed":
        """Returns some of the rows."""
        index = torch.from_numpy(rows).to(self.tokens.device, non_blocking=True)
        return Committed(
            slots=self.slots.index_select(0, index),
            host_slots=self.host_slots[rows],
            tokens=self.tokens.index_select(0, index),
            starts=self.starts[rows],
            counts=self.counts[rows],
            next_tokens=self.next_tokens.index_select(0, index),
            path=None if self.path is None else self.path.index_select(0, index),
            hidden_states={layer: states.index_select(0, index) for layer, states in self.hidden_states.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one round did for one request.

    Attributes:
        request: Id of the request.
        round: Count of this request's rounds, from 0.
        token_ids: Tokens it adds to the output, cut at EOS, a stop and the length.
        text: What it adds to the output text. The beginning of a stop string or of a UTF-8 character is held back
            for a later step.
        logprobs: Log-probability of each of ``token_ids`` under p, in nats.
        proposed_nodes: Drafted nodes that were verified (root not counted).
        proposed_depth: Depth of the longest branch among them.
        accepted: Accepted nodes before any cut. Before the cut, the round emitted ``accepted + 1`` tokens.
        expected_accepted: The expected value of ``accepted``, given the draft tree.
        seconds: Seconds of each stage of the round, if timing is on. Rows that share the round carry the same
            figures: do not add them up over rows.
        finish_reason: ``"stop"``, ``"length"`` or ``"error"`` in a request's last step, else None.
        error: What went wrong in the round, in one sentence, if anything did. Without a ``finish_reason``, the drafts
            were at fault, and the next round goes on from the same place without any.
    """

    request: int
    round: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    proposed_nodes: int = 0
    proposed_depth: int = 0
    accepted: int = 0
    expected_accepted: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request.

    Attributes:
        prompt_ids: The prompt's tokens.
        token_ids: The output's tokens.
        text: The output's text, without a stop string that ended it; empty without a tokenizer.
        finish_reason: ``"stop"`` (EOS, a stop token or string), ``"length"`` or ``"error"``.
        steps: One per round.
        error: With ``"error"``: one sentence on what happened.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: tuple[Step, ...]
    error: str | None = None
