"""What a drafter and a verifier are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.cache.pages import Paging
from specdec.requests import Request, SamplingParams
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness, Noise, Outcome, Verdict

if TYPE_CHECKING:
    from specdec.batch import Batch
    from specdec.cache.storage import Cache
    from specdec.target.runner import ModelRunner
    from specdec.target.target import Target


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of an engine, which a drafting session makes room for: slots, and positions of a slot.

    Attributes:
        leaf_probs: Whether q is wanted at every node, leaves included (``Verifier.needs_leaf_probs``). Only a drafter
            that ``has_leaf_probs`` is asked for it.
        runner: Runs the target. A session may read its cache, and must not change it (``TargetKeys`` of an assistant).
    """

    max_batch_size: int
    max_length: int
    leaf_probs: bool = False
    paging: Paging | None = None  # the size and the number of the pages of every cache; None for a row per slot
    runner: "ModelRunner | None" = None


class Session(ABC):
    """The state of a drafter in one engine.

    The engine calls ``admit`` for every request that speculates; ``observe`` after every piece of its prompt and after
    every round; ``prepare`` and ``propose`` once per round for all rows; and ``release`` at the end. A session never
    changes the target's cache or the output. Where a prompt shares the forward of the first round, one that wants
    hidden states, or has a model over the target's cache, is not asked to draft in it.

    Attributes:
        reads_host: Whether ``propose`` reads ``Batch.host``, and ``observe`` reads ``Outcome.host``. The rounds of any
            other session may be recorded and replayed without its Python.
        hidden_layers: Hidden states it wants in ``Outcome``, numbered as in ``Wants``.
        top_tokens: How many of the target's most probable successors, before all processing, it wants in ``Outcome``
            for every verified node.
        models: The models that it runs: runners, with a cache of their own, or modules. Memory is counted by them.
        caches: Their caches, in which every committed token has a place. The engine shares beginnings in them, and
            clears them when a request ends.
        lookback: How many of the last tokens before its first round a request must show to the session, which keeps
            something of them outside of its caches. None for all, so that its requests share no beginning.
    """

    reads_host: bool = False
    hidden_layers: tuple[int, ...] = ()
    top_tokens: int = 0
    models: "tuple[ModelRunner | nn.Module, ...]" = ()
    caches: "tuple[Cache, ...]" = ()
    lookback: int | None = None

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:  # noqa: B027
        """Begin a request in ``slot``; ``observe`` will report its prompt."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027
        """Take note of tokens that have become final."""

    def prepare(self, batch: "Batch") -> Hashable:
        """Do on the host what must come before ``propose``, and before the recording of it.

        Returns what ``propose`` and ``observe`` depend on besides tensors that stay: a recording is used again for as
        long as this is equal.
        """
        return None

    @abstractmethod
    def propose(self, batch: "Batch") -> DraftTree:
        """Return a draft tree for every row of ``batch``.

        Rows whose ``batch.drafting`` is False may hold any valid tree. Nodes deeper than ``batch.max_depth`` are made
        invalid. In a recorded round ``batch.host`` is None, and the tree has one size whatever the values.

        With ``Sizes.leaf_probs`` the tree has ``draft_probs`` at every node: q at temperature 1 for greedy requests,
        zero in rows that are not in ``batch.drafting``, as it may be in a row before anything is committed.
        """

    def trimmed(self, tree: DraftTree) -> DraftTree:
        """Return trees without columns that nobody needs; never part of a recording, so it may look at values."""
        return tree

    def held(self, slot: int, length: int) -> int:
        """Return how many of the slot's first ``length`` committed positions are right in all of its caches."""
        return length

    def release(self, slot: int) -> None:  # noqa: B027
        """Forget the request in ``slot``, which has ended."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Description:
    """What a drafter is, for whoever inspects, exports, measures or counts it.

    Attributes:
        doubts: What files may say wrongly without an error, by subject; ``experiments.inspecting`` tries the opposite.
    """

    kind: str  # what it is, in words
    parts: tuple[nn.Module, ...] = ()  # the modules that it runs, the target apart; none for a look-up
    at_once: bool = False  # one forward drafts all depths
    reads: tuple[int, ...] = ()  # the target's hidden states that it reads, numbered as in ``Session.hidden_layers``
    tokens: Sequence[int] | None = None  # the target's ids that it can draft; None for all
    facts: Mapping[str, str] = field(default_factory=dict)  # what decides how it drafts, by subject
    doubts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for part in self.parts for each in (*part.parameters(), *part.buffers()))


class Drafter(ABC):
    """Proposes token trees: a description that never changes, and that serves any number of engines.

    Attributes:
        max_nodes: The largest number of drafted nodes in a row (root not counted).
        laws: The laws by which it draws tokens for a *sampled* request. Greedy requests may always get
            ``DETERMINISTIC`` nodes besides.
        is_chain: Whether its drafts are chains: no node has two children.
        is_paths: Whether its drafts are paths of one length that share only the root.
        has_leaf_probs: Whether it can also give q at the leaves.
        adapts: Whether its drafts may depend on more than the request itself: other requests, or how rounds went.
        runs: What a plan counts before anything is loaded: ``"nothing"`` (it looks drafts up), a ``"model"`` or a
            ``"head"`` from the files that its argument ``name`` gives, or the ``"target"``, over keys and values of its
            own; None is not planned.
        usual: The usual sizes of such heads without files: a ``family``, and what is unusual for it
            (``experiments.planning``). A literal, which is read without an import.
    """

    runs: ClassVar[Literal["nothing", "model", "head", "target"] | None] = None
    usual: ClassVar[Mapping[str, Any] | None] = None
    max_nodes: int
    max_depth: int
    laws: frozenset[DraftSampling]
    is_chain: bool
    is_paths: bool = False
    has_leaf_probs: bool = False
    adapts: bool = False

    def describe(self, target: "Target | None" = None) -> Description:
        """Return what it is. Some drafters know that only beside a target."""
        return Description(kind=type(self).__name__)

    @abstractmethod
    def bind(self, target: "Target", sizes: Sizes) -> Session:
        """Begin a session in an engine; refuse a target that the drafter does not fit (vocabulary, widths, device)."""

    def along(self, ahead: Callable[[int], Tensor]) -> "Drafter":
        """Return a drafter of chains with the tokens of a text, by ``ahead``, and the q that each is drawn from."""
        what = "does not say q along a text" if self.is_chain else "draws siblings at random"
        raise ValueError(f"{type(self).__name__} {what}: compare served runs, or give drafter.sampling=deterministic")


class StatelessDrafter(Drafter, Session):
    """A drafter that is its own session; write ``propose``, and ``reads_host`` if that reads ``batch.host``."""

    lookback = 0

    def bind(self, target: "Target", sizes: Sizes) -> Session:
        return self


@dataclass(frozen=True, eq=False)
class Laws:
    """The two distributions of a round, given its trees.

    Attributes:
        stop: The probability that the accepted path ends at each node (the root: nothing is accepted); 0 at padding.
        after: Returns the distribution of the token that follows a path ending at ``stop_nodes``, one node per row: a
            residual, or p after a leaf. What it shares with ``stop`` has been computed already.
    """

    stop: Float[Tensor, "batch node"]
    after: Callable[[Int[Tensor, " batch"]], Float[Tensor, "batch vocab"]]


class Verifier(ABC):
    """An acceptance rule: a pure function of the tables, in the dtype of ``target_probs``, for all rows at once.

    It uses no randomness, so the exact distribution of its output can be enumerated.

    Attributes:
        samplings: The ways of drawing drafts for which the promise holds.
        chain_only: Whether the rule takes chains only, no trees with siblings.
        paths_only: Whether the rule takes only paths that share nothing but the root.
        noise: With ``SHARED``, the engine draws the target's token at every node before the rule looks at it, so that
            ``target_probs`` are one-hot. This holds in plain decoding, too (``specdec.coupling``).
        needs_leaf_probs: Whether the rule reads q at every node, leaves included. For greedy requests it is then given
            p and q at temperature 1. In a row without drafts, q is zero.
        recordable: Whether ``laws`` may be recorded and replayed without its Python, as this project's rules are; one
            from elsewhere must say so. A change of an attribute is noticed.
        walks_greedily: Whether the path goes down while p's token is a child, if p is one-hot everywhere and no node
            was drawn at random. Greedy batches are then judged by tokens alone (``acceptance.certain``). A class that
            defines ``laws`` has to say it anew.
    """

    exactness: Exactness
    samplings: frozenset[DraftSampling]
    chain_only: bool = False
    paths_only: bool = False
    noise: Noise = Noise.FRESH
    needs_leaf_probs: bool = False
    recordable: bool | None = None
    walks_greedily: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "laws" in vars(cls):
            cls.walks_greedily = vars(cls).get("walks_greedily", False)

    def check(self, drafter: Drafter) -> None:
        """Refuse a drafter that this rule is not made for; say why, and name exact verifiers that fit."""
        if (misfit := why_unfit(self, drafter)) is not None:
            reason, remedy = misfit
            taker = "SharedNoiseVerifier" if DraftSampling.COUPLED in drafter.laws else "RejectionVerifier"
            names = [name for name in (taker, "TargetWalkVerifier") if name != type(self).__name__]
            raise ValueError(f"{reason}: use {' or '.join(names)}, or {remedy}")

    def stated_law(
        self, target_probs: Float[Tensor, "*rows vocab"], draft_probs: Float[Tensor, "*rows vocab"]
    ) -> Float[Tensor, "*rows vocab"]:
        """Returns the distribution that the output follows, or for a ``LOSSY`` rule should follow: p by default."""
        return target_probs

    def along(
        self, p: Float[Tensor, "batch depth vocab"], q: Float[Tensor, "batch depth vocab"],
        tokens: Int[Tensor, "batch depth"], law: DraftSampling,
    ) -> Float[Tensor, "batch depth"]:  # fmt: skip
        """Return the probability that at least 1, 2, … drafts are accepted, given that the output is ``tokens``.

        The drafts are a chain that is drawn from q by ``law``; p and q are those along ``tokens``.
        """
        raise NotImplementedError

    @abstractmethod
    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Return where the accepted path ends, given these trees, and which token follows it.

        ``target_probs`` may be anything, even NaN, at invalid nodes.
        """


def why_unfit(rule: Verifier | type[Verifier], drafter: Drafter) -> tuple[str, str] | None:
    """Returns None if a rule takes a drafter's drafts; otherwise why it does not, and what to change in the drafter."""
    name = (rule if isinstance(rule, type) else type(rule)).__name__
    drafts = type(drafter).__name__
    if unfit := sorted(law.name for law in drafter.laws - rule.samplings):
        reason = f"{name} is not made for drafts that are {' or '.join(unfit)}, as {drafts} draws them"
        return reason, "another sampling in the drafter"
    if rule.chain_only and not drafter.is_chain:
        return f"{name} takes chains only, and {drafts} drafts trees", "a chain in the drafter"
    if rule.paths_only and not (drafter.is_chain or drafter.is_paths):
        reason = f"{name} takes independent paths that share only the root, and {drafts} drafts other trees"
        return reason, "a shape such as (3, 1, 1) in the drafter"
    if rule.needs_leaf_probs and not drafter.has_leaf_probs:
        reason = f"{name} reads the draft's probabilities at every node, which {drafts} does not have"
        return reason, "a drafter that has them"
    return None


@dataclass(frozen=True, eq=False)
class Round:
    """What an observer sees of a speculative round (``Engine.on_round``), before its tokens are committed.

    The tensors are the engine's own: an observer copies what it keeps, and changes nothing.

    Attributes:
        target_probs: What the rule was given at every node: p, with the two exceptions that ``Verifier`` explains.
        requests: Those of the rows, whose ``rounds`` does not count this one yet; None where a row does not speculate.
    """

    tree: DraftTree
    target_probs: Float[Tensor, "batch node vocab"]
    verdict: Verdict
    requests: tuple[Request | None, ...]
