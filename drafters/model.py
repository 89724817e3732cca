"""A small causal LM that drafts a chain or a tree.

Leviathan et al. 2023 (arXiv 2211.17192) for chains, SpecInfer (arXiv 2305.09781) for trees; with noise that the target
shares, Daliri et al. 2024 (arXiv 2408.07978).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec import bundled
from specdec.coupling import race
from specdec.engine.slots import Slots
from specdec.interfaces import Drafter
from specdec.modeling.loading import load_model
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.random import Purpose, draw, shared_noise, uniforms
from specdec.requests import GREEDY_BELOW
from specdec.sampling import SamplingTensors, adjust, distribution, path_tokens, warmed
from specdec.tree import DraftTree, TreeShape
from specdec.types import Committed, DraftSampling


class ModelDrafter(Drafter):
    """Drafts with a model of the target's vocabulary, level by level down a static tree shape.

    One forward per level, over all rows and all nodes that have children. It has its own KV cache, committed along
    the accepted path like the target's.

    Args:
        model: The drafting model, on the target's device. Logits wider or narrower than the target's (padded
            vocabularies) are cut or filled up with zero probability.
        shape: What ``TreeShape.of`` takes: a chain's length, branching factors, or paths.
        sampling: How siblings are drawn for sampled requests: ``"iid"``, ``"without_replacement"``,
            ``"deterministic"`` (the top k) or ``"coupled"`` (the first k with the target's noise, for
            ``SharedNoiseVerifier``). Greedy requests always get the top k.
        temperature: The drafter's own; None follows each request. 0 means ``"deterministic"``.
        tokenizer: The model's tokenizer, to check its vocabulary against the target's.
        name: Shown in error messages.
        optimize: See ``ModelRunner``; of this model's forwards.
    """

    has_leaf_probs = True

    def __init__(
        self,
        model: PreTrainedModel,
        shape: TreeShape | int | Sequence[int] | Sequence[Sequence[int]] = 4,
        *,
        sampling: DraftSampling | str = DraftSampling.IID,
        temperature: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        optimize: bool = True,
    ):
        self.optimize = optimize
        self.model = model.eval()
        self.shape = TreeShape.of(shape)
        self.sampling = _law(sampling)
        if temperature is not None and not 0 <= temperature < float("inf"):
            raise ValueError(
                f"drafter temperature={temperature}: give 0 (top-k), a positive number, or None (the request's)"
            )
        if temperature is not None and temperature < GREEDY_BELOW:
            self.sampling = DraftSampling.DETERMINISTIC
        self.temperature = temperature
        self.tokenizer = tokenizer
        self.name = name or model.config.model_type
        self.max_nodes = self.shape.num_nodes
        self.max_depth = self.shape.max_depth
        self.is_chain = self.shape.is_chain
        self.is_paths = self.shape.is_paths
        self.laws = frozenset([self.sampling])

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        shape: TreeShape | int | Sequence[int] | Sequence[Sequence[int]] = 4,
        sampling: DraftSampling | str = DraftSampling.IID,
        temperature: float | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        quantization: str | None = None,
        optimize: bool = True,
    ) -> "ModelDrafter":
        """Load the model and its tokenizer; arguments as for ``Target.from_pretrained`` and the class."""
        model = load_model(name_or_path, dtype=dtype, device=device, quantization=quantization)
        try:
            tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(name_or_path))
        except (OSError, ValueError):
            tokenizer = None  # many drafters ship without one; then only the widths can be compared
        return cls(
            model,
            shape,
            sampling=sampling,
            temperature=temperature,
            tokenizer=tokenizer,
            name=name_or_path,
            optimize=optimize,
        )

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """Check vocabulary and device, and allocate the cache."""
        check_same_vocabulary(self, target)
        if self.model.device != target.device:
            raise ValueError(
                f"the drafter is on {self.model.device} and the target on {target.device}: load both on one device"
            )
        self.runner = ModelRunner(
            self.model,
            max_batch_size=max_batch_size,
            max_length=max_length,
            max_nodes=self.max_nodes,
            optimize=self.optimize,
        )
        self._vocab_size = target.vocab_size
        self._common = min(self.runner.vocab_size, target.vocab_size)
        # Positions of each slot whose keys and values are right. The last committed one may be missing.
        self._known = np.zeros(max_batch_size, dtype=np.int64)
        self._last_token = torch.zeros(max_batch_size, dtype=torch.long, device=target.device)
        self._plans = {
            depth: _Plan(self.shape.cut(depth), target.device, leaves=self.leaf_probs)
            for depth in range(1, self.max_depth + 1)
        }
        self._two = torch.arange(2, device=target.device)
        self._two_ancestors = self._two[:, None] >= self._two

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: object) -> None:
        """Begin with an empty row."""
        self.runner.refresh()
        self._known[slot] = 0

    def observe(self, committed: Committed) -> None:
        """Prefill prompt pieces; commit the accepted path."""
        batch = len(committed.counts)
        rows = slice(committed.first_slot, committed.first_slot + batch)
        counts = torch.from_numpy(committed.counts).to(self._last_token.device, non_blocking=True)
        last = committed.tokens.gather(1, counts[:, None] - 1)[:, 0]
        known = self._known[rows]
        if committed.path is None:
            if (known == committed.starts)[committed.active].all():
                tokens = self._in_vocabulary(committed.tokens)
                self.runner.prefill(tokens, committed.starts, committed.counts, first_slot=committed.first_slot)
                known[committed.active] += committed.counts[committed.active]
        else:
            if not self.is_chain:
                starts = torch.from_numpy(committed.starts).to(self._last_token.device, non_blocking=True)
                self.runner.cache.commit(starts, committed.path, first_slot=committed.first_slot)
            drafted = committed.active & (known >= committed.starts)
            # All but the last committed token had children, so they were forwarded.
            known[drafted] = (committed.starts + committed.counts - 1)[drafted]
        active = torch.from_numpy(committed.active).to(self._last_token.device, non_blocking=True)
        self._last_token[rows] = torch.where(active, last, self._last_token[rows])

    @torch.inference_mode()
    def propose(self, slots: Slots) -> DraftTree:
        """Draft level by level."""
        depth = min(self.max_depth, int(slots.host_max_depth.max()))
        if depth == 0 and not self.leaf_probs:
            return DraftTree.root_only(slots.roots)
        plan = self._plans[max(depth, 1)]
        shape = plan.shape
        batch = len(slots)
        sampling = self._draft_sampling(slots.sampling)
        sampled = sampling.any_sampled and self.sampling is not DraftSampling.DETERMINISTIC
        greedy = (sampling.temperature == 0)[:, None] if sampled and sampling.any_greedy else None
        if self.leaf_probs and sampling.any_greedy:
            sampling = warmed(sampling, slots.drafting)
        fresh = sampled and self.sampling is not DraftSampling.COUPLED
        uniform = uniforms(slots.keys, slots.rounds, Purpose.DRAFT, shape.num_nodes) if fresh else None
        tokens = slots.roots.new_zeros(batch, shape.num_nodes + 1)
        tokens[:, 0] = slots.roots
        draft_probs = self.model_zeros(batch, shape.num_nodes + 1) if fresh or self.leaf_probs else None
        valid = None
        self._catch_up(slots)
        for number, level in enumerate(plan.levels):
            logits = self._root_logits(slots) if number == 0 else self._level_logits(slots, tokens, level)
            if level.rows is not None:
                logits = logits.index_select(1, level.rows)
            paths = None
            if sampling.seen is not None:
                above = plan.ancestors[level.parents, : level.stop].expand(batch, -1, -1)
                paths = path_tokens(tokens[:, : level.stop], above)
            scores = adjust(logits[..., : self._common], sampling, paths)
            q = distribution(scores, sampling) if sampled or self.leaf_probs else None
            if draft_probs is not None and q is not None:
                draft_probs[:, level.parents_at, : self._common] = q
            if level.width == 0:
                continue
            if q is None or not sampled:
                tokens[:, level.children_at] = _top(scores, level)
                continue
            drawn, exists = self._draw(q, level, uniform) if uniform is not None else self._first(q, level, slots)
            if greedy is not None:
                drawn = torch.where(greedy, _top(scores, level), drawn)
                exists = None if exists is None else exists | greedy
            tokens[:, level.children_at] = drawn
            if exists is not None:
                valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
                valid[:, level.children_at] = exists & valid[:, level.parent_of]
            elif valid is not None:
                valid[:, level.children_at] = valid[:, level.parent_of]
        if self.leaf_probs and draft_probs is not None and not (slots.host_drafting & slots.host_active).all():
            draft_probs *= slots.drafting[:, None, None]
        law: DraftSampling | Tensor = self.sampling if sampled else DraftSampling.DETERMINISTIC
        if greedy is not None:
            law = torch.where(greedy, int(DraftSampling.DETERMINISTIC), int(self.sampling)).to(torch.int8)
            law = law.expand_as(tokens)
        return DraftTree.from_shape(shape, tokens, sampling=law, draft_probs=draft_probs, valid=valid)

    def model_zeros(self, batch: int, nodes: int) -> Float[Tensor, "batch node vocab"]:
        """Room for q in the target's vocabulary; what the drafter's lacks stays zero."""
        return torch.zeros(batch, nodes, self._vocab_size, device=self._last_token.device)

    def _draft_sampling(self, sampling: SamplingTensors) -> SamplingTensors:
        """The request's parameters, with the drafter's own temperature for sampled rows."""
        if sampling.seen is not None:
            sampling = replace(sampling, seen=sampling.seen[:, : self._common])
        if self.temperature is None or not sampling.any_sampled:
            return sampling
        own = torch.where(sampling.temperature == 0, 0.0, self.temperature)
        return replace(sampling, temperature=own)

    def _catch_up(self, slots: Slots) -> None:
        """Prefill what was committed while this drafter was not asked to propose."""
        missing = np.where(slots.host_drafting & slots.host_active, slots.host_lengths - self._known[: len(slots)], 0)
        if missing.max() <= 1:
            return
        width = int(missing.max())
        starts = np.where(missing > 0, self._known[: len(slots)], slots.host_lengths)
        index = np.minimum(starts[:, None] + np.arange(width), slots.host_tokens.shape[1] - 1)
        tokens = torch.from_numpy(np.take_along_axis(slots.host_tokens, index, axis=1).astype(np.int64))
        self.runner.prefill(self._in_vocabulary(tokens.to(self._last_token.device)), starts, missing)
        self._known[: len(slots)] += missing

    def _root_logits(self, slots: Slots) -> Float[Tensor, "batch 1 vocab"]:
        """Logits at the root, after the last committed token again: where it was a leaf, it was never forwarded."""
        host_again = slots.host_active & (slots.host_lengths > 0)
        starts, last = slots.lengths, self._last_token[: len(slots)]
        if host_again.all():  # as nearly always: a prompt of one token has nothing before its root
            starts = starts - 1
        else:
            again = slots.active & (slots.lengths > 0)
            starts, last = starts - again.long(), torch.where(again, last, slots.roots)
        logits = self.runner.verify_level(
            self._in_vocabulary(torch.stack([last, slots.roots], dim=1)),
            starts,
            slots.host_lengths - host_again,
            cells=self._two,
            depths=self._two,
            ancestors=self._two_ancestors,
        )
        self._known[: len(slots)] = np.where(slots.host_active, slots.host_lengths, self._known[: len(slots)])
        if host_again.all():
            return logits[:, 1:]
        return logits.gather(1, again.long()[:, None, None].expand(-1, 1, logits.shape[2]))

    def _level_logits(
        self, slots: Slots, tokens: Int[Tensor, "batch node"], level: "_Level"
    ) -> Float[Tensor, "batch query vocab"]:
        return self.runner.verify_level(
            self._in_vocabulary(tokens[:, level.start : level.stop]),
            slots.lengths,
            slots.host_lengths,
            cells=level.cells,
            depths=level.depths,
            ancestors=level.ancestors,
            sees_all=level.sees_all,
        )

    def _draw(
        self, q: Float[Tensor, "batch parent vocab"], level: "_Level", uniform: Float[Tensor, "batch draw"]
    ) -> tuple[Int[Tensor, "batch child"], Bool[Tensor, "batch child"] | None]:
        """Draw every parent's children; where q may run out, also which of them exist."""
        # Draw i of the round belongs to node i + 1, whatever the order of drawing.
        u = uniform[:, level.children_at.start - 1 : level.children_at.stop - 1]
        if self.sampling is DraftSampling.IID or level.width == 1:
            weights = q if level.one_each else q.index_select(1, level.row_of)
            return draw(weights, u), None
        left = q.clone()
        drawn = torch.zeros_like(u, dtype=torch.long)
        exists = torch.ones_like(u, dtype=torch.bool)
        for rank, (columns, rows) in enumerate(level.by_rank):
            weights = left.index_select(1, rows)
            token = draw(weights, u[:, columns])
            drawn[:, columns] = token
            if rank > 0:
                exists[:, columns] = weights.sum(-1) > 0
            if rank + 1 < level.width:
                left[:, rows] = weights.scatter_(2, token[..., None], 0.0)
        return drawn, exists

    def _first(
        self, q: Float[Tensor, "batch parent vocab"], level: "_Level", slots: Slots
    ) -> tuple[Int[Tensor, "batch child"], Bool[Tensor, "batch child"] | None]:
        """Every parent's first children in the race that the target watches; where q runs out, fewer exist."""
        positions = slots.lengths[:, None] + (level.depth + 1)
        arrivals = race(q, shared_noise(slots.keys, positions, q.shape[2]))
        if level.one_each:
            return arrivals.argmax(-1), None
        earliest, token = arrivals.topk(level.width, dim=-1)
        return token[:, level.row_of, level.rank_of], earliest[:, level.row_of, level.rank_of] > 0

    def _in_vocabulary(self, tokens: Int[Tensor, "batch position"]) -> Int[Tensor, "batch position"]:
        """Tokens that a narrower drafter does not have become its last one: a bad draft, never a wrong output."""
        if self.runner.vocab_size >= self._vocab_size:
            return tokens
        return tokens.clamp(max=self.runner.vocab_size - 1)


class _Level:
    """One level of a shape: which nodes to forward, which of them have children, and where the children stand.

    Attributes:
        depth: Of the nodes to forward.
        start, stop: Nodes to forward: from the first parent to the last. Childless ones between go along, because a
            forward's nodes are consecutive.
        parents: Nodes with children; with ``leaves``, all of this depth.
        rows: Of the parents among the forwarded nodes; None if they are all.
        parents_at: The same as a slice, where they stand side by side.
        children_at: All their children, which always do.
        cells, depths, ancestors: Indices of the nodes to forward; depths of all nodes up to them; whom they see.
        sees_all: They see all of these, as those of a chain do.
        parent_of: Parent of each child, as a node; ``row_of``: as an index into ``parents``.
        rank_of: Sibling rank of each child.
        by_rank: For every rank, the children of that rank (indices into ``children``) and their parents' rows.
        one_each: Every parent has one child.
        width: Most children of a parent; 0 at the last level, which is there with ``leaves``.
    """

    def __init__(self, shape: TreeShape, depth: int, device: torch.device, *, leaves: bool):
        layout = DraftTree.from_shape(shape, torch.zeros(1, shape.num_nodes + 1, dtype=torch.long, device=device))
        parents = [node for node, d in enumerate(shape.depths) if d == depth and (leaves or shape.children[node])]
        self.depth = depth
        family = [(child, row, rank) for row, p in enumerate(parents) for rank, child in enumerate(shape.children[p])]
        family.sort()
        self.start, self.stop = parents[0], parents[-1] + 1
        self.width = max(len(shape.children[parent]) for parent in parents)
        self.one_each = all(len(shape.children[parent]) == 1 for parent in parents)

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.long, device=device)

        self.parents = index(parents)
        self.rows = None if len(parents) == self.stop - self.start else self.parents - self.start
        self.parents_at = slice(self.start, self.stop) if self.rows is None else self.parents
        first = family[0][0] if family else 0
        self.children_at = slice(first, first + len(family))
        self.cells = torch.arange(self.start, self.stop, device=device)
        self.depths = layout.depth[0, : self.stop]
        self.ancestors = layout.ancestors[0, self.start : self.stop, : self.stop]
        self.sees_all = bool(self.ancestors.all())
        self.row_of = index([row for _, row, _ in family])
        self.rank_of = index([rank for _, _, rank in family])
        self.parent_of = self.parents[self.row_of]
        self.by_rank = [
            (
                index([i for i, (_, _, r) in enumerate(family) if r == rank]),
                index([row for _, row, r in family if r == rank]),
            )
            for rank in range(self.width)
        ]


class _Plan:
    """A shape's levels and index tensors, made once: a round copies no index to the device."""

    def __init__(self, shape: TreeShape, device: torch.device, *, leaves: bool):
        self.shape = shape
        self.levels = [_Level(shape, depth, device, leaves=leaves) for depth in range(shape.max_depth + leaves)]
        example = DraftTree.from_shape(shape, torch.zeros(1, shape.num_nodes + 1, dtype=torch.long, device=device))
        self.ancestors = example.ancestors[0]


def _top(scores: Float[Tensor, "batch parent vocab"], level: _Level) -> Int[Tensor, "batch child"]:
    """Every parent's most probable tokens, in order, for its children."""
    if level.one_each:
        return scores.argmax(-1)
    return scores.topk(level.width, dim=-1).indices[:, level.row_of, level.rank_of]


def _law(sampling: DraftSampling | str) -> DraftSampling:
    choices = (
        DraftSampling.IID,
        DraftSampling.WITHOUT_REPLACEMENT,
        DraftSampling.DETERMINISTIC,
        DraftSampling.COUPLED,
    )
    for law in choices:
        if sampling is law or (isinstance(sampling, str) and sampling.upper() == law.name):
            return law
    raise ValueError(f"drafter sampling={sampling!r}: give one of {', '.join(law.name.lower() for law in choices)}")


def check_same_vocabulary(drafter: ModelDrafter, target: Target) -> None:
    """Refuse a drafter whose token ids mean other text than the target's.

    Raises:
        ValueError: Names both models and the first difference.
    """
    ours, theirs = drafter.tokenizer, target.tokenizer
    if ours is not None and theirs is not None:
        mine, wanted = ours.get_vocab(), theirs.get_vocab()
        if mine != wanted:
            differing = sorted(token for token in mine.keys() | wanted.keys() if mine.get(token) != wanted.get(token))
            token = differing[0]
            raise ValueError(
                f"the drafter {drafter.name} has another vocabulary than the target {target.name}: {len(differing)} "
                f"tokens differ, for example {token!r} is {mine.get(token)} in the drafter's and {wanted.get(token)} "
                f"in the target's; choose a drafter of the target's family"
            )
        return
    output = drafter.model.get_output_embeddings()
    assert output is not None, "the runner has checked"
    width = output.weight.shape[0]
    # Padding to a multiple of 64 or 128 is common; a larger gap is another vocabulary.
    if abs(width - target.vocab_size) > 512:
        raise ValueError(
            f"the drafter {drafter.name} has {width} tokens and the target {target.name} {target.vocab_size}: "
            f"choose a drafter with the target's vocabulary"
        )
