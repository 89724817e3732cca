"""The types that travel along the main path. Axes: ``batch node depth position vocab layer head head_dim``."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_SHOWN = 60  # characters of an output in its repr


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
        valid: False where the laws were not finite (because of NaN logits, say); nothing else in the row means anything
            then.
    """

    path: Int[Tensor, "batch depth"]  # indices of the accepted nodes from the root's child downwards, -1 padded
    num_accepted: Int[Tensor, " batch"]
    expected_accepted: Float[Tensor, " batch"]  # the expected length of the path, given this draft tree
    next_token: Int[Tensor, " batch"]  # the recovered or bonus token that follows the path
    valid: Bool[Tensor, " batch"]


@dataclass(frozen=True, eq=False, kw_only=True)
class HostOutcome:
    """The numbers of an ``Outcome`` on the host; the last three are None after a piece of a prompt.

    Attributes:
        emitted: The tokens of the accepted nodes and the one that follows: ``counts`` of them, then padding.
    """

    slots: Int[np.ndarray, " batch"]
    starts: Int[np.ndarray, " batch"]
    counts: Int[np.ndarray, " batch"]
    path: Int[np.ndarray, "batch depth"] | None = None
    emitted: Int[np.ndarray, "batch position"] | None = None
    proposed_depth: Int[np.ndarray, " batch"] | None = None  # the depth of each row's drafts


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """Tokens that became final, after a piece of a prompt or after a round: their keys and values are in the cache.

    After a piece of a prompt the tokens are that piece; after a round they are the root and the accepted path.

    Attributes:
        counts: 0 in a row whose round decided nothing, and for a drafter in a row that does not speculate.
        next_tokens: The token that follows the last one, known but not in the cache. So pairs (hidden state at t, token
            t+1) are complete.
        path: After a round, the accepted nodes (-1 padded, root left out) in the tree that was proposed, else None.
        hidden_states: Hidden states at these positions, by layer index, as far as the session asked for them.
        node_tokens: After a round, the token of every node that was verified, rejected ones too.
        node_valid: After a round, False for nodes that were verified although they are none (``DraftTree.valid``).
        top_tokens: After a round, the target's most probable successors of each node, the most probable first; None if
            the session's ``top_tokens`` is 0.
        host: The same numbers on the host, for a session that says ``reads_host``, and after a piece of a prompt; else
            None.
    """

    slots: Int[Tensor, " batch"]
    starts: Int[Tensor, " batch"]  # the position of each row's first token
    tokens: Int[Tensor, "batch position"]  # ``counts`` of them, then padding
    counts: Int[Tensor, " batch"]
    next_tokens: Int[Tensor, " batch"]
    path: Int[Tensor, "batch depth"] | None = None
    hidden_states: Mapping[int, Float[Tensor, "batch position hidden"]] = field(default_factory=dict)
    node_tokens: Int[Tensor, "batch node"] | None = None
    node_valid: Bool[Tensor, "batch node"] | None = None
    top_tokens: Int[Tensor, "batch node rank"] | None = None
    host: HostOutcome | None = None

    def rows(self, rows: np.ndarray) -> "Outcome":
        return take_rows(self, rows, torch.from_numpy(rows).to(self.tokens.device, non_blocking=True))

    @property
    def last_tokens(self) -> Int[Tensor, " batch"]:
        """The last of each row's tokens; the first of them in a row that has none."""
        return self.tokens.gather(1, (self.counts[:, None] - 1).clamp_(min=0))[:, 0]


def take_rows(value: Any, rows: np.ndarray, index: Tensor) -> Any:
    """Returns some rows of all tensors and arrays of a value, as copies; ``index`` are the rows on the device."""
    if isinstance(value, Tensor):
        return value.index_select(0, index)
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, Mapping):
        return {name: take_rows(part, rows, index) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: take_rows(getattr(value, part.name), rows, index) for part in fields(value)}
        return replace(value, **parts)
    return value


@dataclass(frozen=True, kw_only=True)
class Timestamps:
    """When things happened to a request, in seconds on the clock of ``time.perf_counter``.

    Attributes:
        arrived: It was given to the engine: text, before it was tokenized. All prompts of a call arrive together.
        admitted: It took its slot.
        prefilled: The last part of its prompt was computed; on a GPU, given to the device.
        finished: The host saw its last tokens, or the error that ended it.
        ingestion: Seconds that template, tokenizer and checks took for this request alone, before ``admitted``.
        reused: Tokens that were found in the cache when it was admitted.
        preempted: Seconds without a slot between its rounds.
        recomputed, swapped: Tokens that were prefilled again, or came back from the host's memory, after preemptions.
        swap_seconds: Seconds that the ways there and back took.
    """

    arrived: float
    admitted: float
    prefilled: float
    finished: float
    ingestion: float
    reused: int = 0
    preemptions: int = 0
    preempted: float = 0.0
    recomputed: int = 0
    swapped: int = 0
    swap_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one round did for one request.

    Attributes:
        request: Id of the request.
        round: Count of this request's rounds, from 0.
        token_ids: Tokens it adds to the output, cut at EOS, a stop and the length.
        text: What it adds to the output text; the beginning of a stop string or a UTF-8 character is held back.
        logprobs: Log-probability of each of ``token_ids`` under p, in nats.
        raw_logprobs: The same under the model's own distribution, before all processing; empty unless
            ``SamplingParams.logprobs`` asks for it.
        top_logprobs: For each of ``token_ids``, pairs of the model's most probable tokens and their log-probabilities.
        proposed_nodes: Drafted nodes that were verified (root not counted).
        proposed_depth: Depth of the longest branch among them.
        accepted: Accepted nodes before any cut. Before the cut, the round emitted ``accepted + 1`` tokens.
        expected_accepted: The expected value of ``accepted``, given the draft tree.
        seconds: Seconds of each stage of the round, if timing is on, the same in all rows: do not add them up.
        elapsed: Seconds from when the request took its slot to when the host saw these tokens, prefill included.
        visible: When the host had read these tokens, on the clock of ``time.perf_counter``.
        timestamps: In the request's last step alone.
        finish_reason: ``"stop"``, ``"length"`` or ``"error"`` in a request's last step, else None.
        error: With ``"error"``: what went wrong in the round, in one sentence.
    """

    request: int
    round: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    proposed_nodes: int = 0
    proposed_depth: int = 0
    accepted: int = 0
    expected_accepted: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    elapsed: float = field(default=0.0, compare=False)  # a second run of the same is equal, and takes its own time
    visible: float = field(default=0.0, compare=False)
    timestamps: Timestamps | None = field(default=None, compare=False)
    finish_reason: str | None = None
    error: str | None = None

    def shortened(self, count: int) -> "Step":
        names = ("token_ids", "logprobs", "raw_logprobs", "top_logprobs")
        return replace(self, **{name: getattr(self, name)[:count] for name in names})

    def __repr__(self) -> str:
        depth = f"accepted {self.accepted} of depth {self.proposed_depth} ({self.proposed_nodes} nodes)"
        ended = [self.finish_reason, self.error and f"error: {self.error}"]
        what = ", ".join([depth if self.proposed_nodes else "no draft", *filter(None, ended)])
        return f"Step(request {self.request}, round {self.round}: {list(self.token_ids)} {self.text!r}, {what})"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request.

    Attributes:
        text: Without a stop string that ended it; empty without a tokenizer.
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

    @property
    def mean_acceptance_length(self) -> float | None:
        """Emitted tokens per round before any cut, recovered or bonus token included; None without a round."""
        decided = [step for step in self.steps if step.error is None and step.finish_reason != "error"]
        return 1 + sum(step.accepted for step in decided) / len(decided) if decided else None

    @property
    def timestamps(self) -> Timestamps | None:
        return self.steps[-1].timestamps if self.steps else None

    @property
    def emissions(self) -> tuple[tuple[float, int], ...]:
        """When tokens became visible to the host, and how many, round by round."""
        return tuple((step.visible, len(step.token_ids)) for step in self.steps if step.token_ids)

    @property
    def seconds(self) -> float:
        """Seconds from when the request took its slot to its end, prefill included; waiting for a slot is not."""
        return self.steps[-1].elapsed if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens over ``seconds``. Requests that share a batch each have the whole batch's time."""
        return len(self.token_ids) / self.seconds if self.seconds else None

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(value for step in self.steps for value in step.logprobs)

    @property
    def raw_logprobs(self) -> tuple[float, ...]:
        return tuple(value for step in self.steps for value in step.raw_logprobs)

    @property
    def top_logprobs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        return tuple(value for step in self.steps for value in step.top_logprobs)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}…"
        length, speed = self.mean_acceptance_length, self.tokens_per_second
        figures = [f"{len(self.token_ids)} tokens in {len(self.steps)} rounds"]
        figures += [] if length is None else [f"mean acceptance length {length:.2f}"]
        figures += [] if speed is None else [f"{speed:.0f} tokens/s" if speed >= 10 else f"{speed:.2g} tokens/s"]
        figures.append(self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error}")
        return f"Completion({text!r}: {', '.join(figures)})"
