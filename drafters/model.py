"""A small causal LM that drafts a chain or a tree.

Leviathan et al. 2023 (arXiv 2211.17192) for chains, SpecInfer (arXiv 2305.09781) for trees; with noise that the target
shares, Daliri et al. 2024 (arXiv 2408.07978).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.arguments import flag
from specdec.arguments import number as checked_number
from specdec.cache.formats import check_format
from specdec.drafting.draws import drawn, first_arrivals, top
from specdec.drafting.follower import Follower
from specdec.drafting.levels import Level, LevelPlan
from specdec.drafting.on_device import DeviceDrafter
from specdec.drafting.vocabulary import VocabularyMap, check_same_vocabulary
from specdec.modeling.loading import load_model, load_tokenizer
from specdec.modeling.runner import ModelRunner
from specdec.modeling.support import check_model, check_tokenizer
from specdec.modeling.target import Target
from specdec.placement import main_device
from specdec.quantization.stored import output_width
from specdec.random import Purpose, shared_noise, uniforms
from specdec.requests import GREEDY_BELOW
from specdec.sampling import SamplingTensors, adjust, distribution, path_tokens, warmed
from specdec.slots import Slots
from specdec.tree import DraftTree, TreeShape
from specdec.types import Committed, Decided, DraftSampling


class ModelDrafter(DeviceDrafter):
    """Drafts with a model of the target's vocabulary, level by level down a static tree shape.

    Each level takes one forward over all rows and all nodes that have children. The model has its own KV cache, which
    follows the accepted path like the target's.

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
        attention: See ``ModelRunner``; for this model's forwards.
        optimize: See ``ModelRunner``; for this model's forwards.
        kv_cache: See ``ModelRunner``; for this model's keys and values. It may differ from the target's.

    Raises:
        ValueError: An argument is of the wrong type or out of its range.
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
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
    ):
        check_model("model", model, "ModelDrafter.from_pretrained")
        check_tokenizer(tokenizer)
        self.attention, self.optimize = attention, flag("optimize", optimize)
        check_format(kv_cache)
        self.kv_cache = kv_cache
        self.model = model
        self.shape = TreeShape.of(shape)
        self.sampling = _law(sampling)
        if temperature is not None:
            remedy = "give 0 (top-k), a positive number, or None (the request's)"
            temperature = checked_number("drafter temperature", temperature, remedy)
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"drafter temperature={temperature}: {remedy}")
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
        device_map: str | Mapping[str, Any] | None = None,
        max_memory: Mapping[Any, Any] | None = None,
        quantization: str | None = None,
        quantization_check: bool = True,
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
    ) -> "ModelDrafter":
        """Load the model and its tokenizer; arguments as for ``Target.from_pretrained`` and the class."""
        options: dict[str, Any] = {
            "device_map": device_map,
            "max_memory": max_memory,
            "revision": revision,
            "subfolder": subfolder,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
            "trust_remote_code": trust_remote_code,
        }
        options = {name: value for name, value in options.items() if value not in (None, False)}
        check_format(kv_cache)  # before the model is loaded
        model = load_model(
            name_or_path,
            dtype=dtype,
            device=device,
            quantization=quantization,
            quantization_check=quantization_check,
            **options,
        )
        try:
            tokenizer = load_tokenizer(name_or_path, **options)
        except ValueError:
            tokenizer = None  # many drafters ship without one; then only the widths can be compared
        return cls(
            model,
            shape,
            sampling=sampling,
            temperature=temperature,
            tokenizer=tokenizer,
            name=name_or_path,
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )

    def bind(self, target: Target, *, max_batch_size: int, max_length: int, leaf_probs: bool = False) -> None:
        """Check vocabulary and device, and allocate the cache."""
        output = self.model.get_output_embeddings()
        if output is not None:  # without one, the runner says so
            check_same_vocabulary(self.name, self.tokenizer, output_width(output), target)
        device = main_device(self.model)
        if device != target.device:
            raise ValueError(f"the drafter is on {device} and the target on {target.device}: load both on one device")
        try:
            runner = ModelRunner(
                self.model,
                max_batch_size=max_batch_size,
                max_length=max_length,
                max_nodes=self.max_nodes,
                attention=self.attention,
                optimize=self.optimize,
                kv_cache=self.kv_cache,
            )
        except ValueError as error:  # else it would read as if the target were meant
            raise ValueError(f"the drafter {self.name}: {error}") from error
        self._leaf_probs = leaf_probs
        self._vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size)
        self._follower = Follower(runner, max_batch_size=max_batch_size, to_model=self._vocabulary.to_drafter)
        self._plans = LevelPlan.by_depth(self.shape, target.device, leaves=leaf_probs)

    @property
    def runner(self) -> ModelRunner:
        """Runs the model, from ``bind`` on."""
        return self._follower.runner

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: object) -> None:
        """Begin with an empty row."""
        self._follower.admit(slot)

    def release(self, slot: int) -> None:
        """Forget the row."""
        self._follower.release(slot)

    def observe(self, committed: Committed) -> None:
        """Prefill prompt pieces; commit the accepted path."""
        self._follower.observe(committed, in_place=self.is_chain)

    @torch.inference_mode()
    def propose(self, slots: Slots) -> DraftTree:
        """Draft level by level."""
        depth = min(self.max_depth, int(slots.host_max_depth.max()))
        if depth == 0 and not self._leaf_probs:
            return DraftTree.root_only(slots.roots)
        self._follower.catch_up(slots)
        return self._drafted(slots, self._plans[max(depth, 1)])

    @property
    def version(self) -> Hashable:
        """The model's."""
        return self.runner.version

    def prepare(self, slots: Slots) -> Hashable:
        """Catch up with what was committed meanwhile."""
        self._follower.catch_up(slots)
        return None

    @torch.inference_mode()
    def draft(self, slots: Slots) -> DraftTree:
        """Draft the whole shape."""
        return self._drafted(slots, self._plans[self.max_depth])

    def follow(self, decided: Decided) -> None:
        """Commit the accepted path on the device."""
        self._follower.follow(decided, in_place=self.is_chain)

    def followed(self, slots: Slots, counts: np.ndarray, told: np.ndarray) -> None:
        """Note what was committed."""
        self._follower.followed(slots, counts, told)

    def _drafted(self, slots: Slots, plan: LevelPlan) -> DraftTree:
        """Returns trees of a plan's shape."""
        shape = plan.shape
        batch = len(slots)
        sampling = self._draft_sampling(slots.sampling)
        sampled = sampling.any_sampled and self.sampling is not DraftSampling.DETERMINISTIC
        greedy = (sampling.temperature == 0)[:, None] if sampled and sampling.any_greedy else None
        if self._leaf_probs and sampling.any_greedy:
            sampling = warmed(sampling, slots.drafting)
        fresh = sampled and self.sampling is not DraftSampling.COUPLED
        uniform = uniforms(slots.keys, slots.rounds, Purpose.DRAFT, shape.num_nodes) if fresh else None
        tokens = slots.roots.new_zeros(batch, shape.num_nodes + 1)
        tokens[:, 0] = slots.roots
        draft_probs = self._zeros(batch, shape.num_nodes + 1, slots.device) if fresh or self._leaf_probs else None
        valid = None
        for number, level in enumerate(plan.levels):
            if number == 0:
                logits = self._follower.root_logits(slots)
            else:
                logits = self._follower.level_logits(slots, tokens[:, level.start : level.stop], level.topology)
            if level.rows is not None:
                logits = logits.index_select(1, level.rows)
            paths = None
            if sampling.seen is not None:
                above = level.topology.ancestors[0, level.parents].expand(batch, -1, -1)
                paths = path_tokens(self._vocabulary.to_drafter(tokens[:, : level.stop]), above)
            scores = adjust(logits[..., : self._vocabulary.common], sampling, paths)
            q = distribution(scores, sampling) if sampled or self._leaf_probs else None
            if draft_probs is not None and q is not None:
                draft_probs[:, level.parents_at, : self._vocabulary.common] = q
            if level.width == 0:
                continue
            if q is None or not sampled:
                tokens[:, level.children_at] = top(scores, level)
                continue
            children, exists = self._drawn(q, level, uniform, slots)
            if greedy is not None:
                children = torch.where(greedy, top(scores, level), children)
                exists = None if exists is None else exists | greedy
            tokens[:, level.children_at] = children
            if exists is not None:
                valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
                valid[:, level.children_at] = exists & valid[:, level.parent_of]
            elif valid is not None:
                valid[:, level.children_at] = valid[:, level.parent_of]
        if (
            self._leaf_probs
            and draft_probs is not None
            and (slots.key_bound is not None or not slots.host_drafting.all())
        ):
            draft_probs *= slots.drafting[:, None, None]
        law: DraftSampling | Tensor = self.sampling if sampled else DraftSampling.DETERMINISTIC
        if greedy is not None:
            law = torch.where(greedy, int(DraftSampling.DETERMINISTIC), int(self.sampling)).to(torch.int8)
            law = law.expand_as(tokens)
        return DraftTree.from_shape(shape, tokens, sampling=law, draft_probs=draft_probs, valid=valid)

    def _zeros(self, batch: int, nodes: int, device: torch.device) -> Float[Tensor, "batch node vocab"]:
        """Returns room for q in the target's vocabulary; tokens that the drafter lacks stay zero."""
        return torch.zeros(batch, nodes, self._vocabulary.target, device=device)

    def _draft_sampling(self, sampling: SamplingTensors) -> SamplingTensors:
        """Returns the requests' parameters, with the drafter's own temperature for sampled rows."""
        if sampling.seen is not None:
            sampling = replace(sampling, seen=sampling.seen[:, : self._vocabulary.common])
        if self.temperature is None or not sampling.any_sampled:
            return sampling
        own = torch.where(sampling.temperature == 0, 0.0, self.temperature)
        return replace(sampling, temperature=own)

    def _drawn(
        self,
        q: Float[Tensor, "batch parent vocab"],
        level: Level,
        uniform: Float[Tensor, "batch draw"] | None,
        slots: Slots,
    ) -> tuple[Int[Tensor, "batch child"], Bool[Tensor, "batch child"] | None]:
        """Returns every parent's children, drawn at random, and which of them exist."""
        if uniform is not None:
            # Number i of the round belongs to node i + 1, in whichever order nodes are drawn.
            mine = uniform[:, level.children_at.start - 1 : level.children_at.stop - 1]
            return drawn(q, level, mine, self.sampling)
        positions = slots.lengths[:, None] + (level.depth + 1)
        return first_arrivals(q, level, shared_noise(slots.keys, positions, q.shape[2]))


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
