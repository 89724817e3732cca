"""Gemma-4's assistants: small models whose attention reads the target's keys and values, and which store none.

A step reads the target's embedding of a token and the state before it, and gives the next token's logits and a state.
All steps of a round stand at the root's position, and see the committed ones, in the last layer of each kind (full,
sliding) that stores keys and values, as in transformers' ``Gemma4AssistantForCausalLM`` and
``SinglePositionMultiTokenCandidateGenerator``.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Gemma4TextConfig, PreTrainedModel

from drafters.heads.bound import beside
from drafters.heads.files import Where
from drafters.heads.last_state import LastStateScorer
from drafters.own_model import Drawn, OwnModelDrafter
from specdec import Batch, ForwardBatch, ModelRunner, Target, Topology
from specdec.arguments import instance
from specdec.attention import BACKENDS
from specdec.attention.call import NAME, AttentionCall, answered_by, configs_of, switched
from specdec.attention.facts import Reach
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.scored import ScoredSession
from specdec.drafting.window import take
from specdec.execution.executor import ModuleCaller
from specdec.interfaces import Description, Sizes
from specdec.placement import is_divided
from specdec.target.loading import load_model

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


class LoadedAssistant(Where, Drawn, total=False):
    """Where an assistant's files are (``Where``), and ``Drawn``."""


class AssistantDrafter(OwnModelDrafter):
    """Drafts with an assistant of a Gemma-4 target, or its twin for unified models, level by level down a tree."""

    runs = "head"

    def __init__(self, assistant: PreTrainedModel, shape: AnyTree = 4, *, name: str = "", **options: Unpack[Drawn]):
        instance("assistant", assistant, PreTrainedModel, "an assistant, or load one with from_pretrained(…)")
        name, kind = name or assistant.config.model_type, assistant.config.model_type
        if kind not in TYPES:
            raise ValueError(f"{name} is a {kind} model and no assistant of Gemma-4: give one, or drafter=model")
        super().__init__(tree_of(shape), name=name, **options)
        self.assistant = assistant
        self.has_leaf_probs = self.tree.has_leaf_probs

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        shape: AnyTree = 4,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        **options: Unpack[LoadedAssistant],
    ) -> "AssistantDrafter":
        """Load an assistant from a folder or the hub; ``bind`` copies it to the target's device and dtype."""
        settings: Any = {key: options.pop(key) for key in Drawn.__annotations__ if key in options}
        where: Any = options
        with buildable():
            assistant = load_model(str(path), dtype=dtype, device=device, **where)
        return cls(assistant, shape, name=str(path), **settings)

    def describe(self, target: Target | None = None) -> Description:
        return replace(super().describe(target), kind="assistant of Gemma-4", parts=(self.assistant,))

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Check that it is an assistant of this target, and make room for one hidden state per slot."""
        keys = self._keys(target, sizes)
        step = AssistantStep(beside(self.assistant, target.device, target.dtype), keys)
        scorer = AssistantScorer(
            keys=keys,
            embed=target.model.get_input_embeddings(),
            max_shown=self.tree.max_shown,
            heads=ModuleCaller(step, optimize=self.optimize),
            max_batch_size=sizes.max_batch_size,
            dtype=target.dtype,
            device=target.device,
        )
        return ScoredSession(self, scorer, target, sizes, hidden_layers=(-1,))

    def _keys(self, target: Target, sizes: Sizes) -> "TargetKeys":
        """Return what the assistant attends to: of every kind, the target's last layer that stores keys and values."""
        this, that, remedy = f"the assistant {self.name}", f"the target {target.name}", "give this target's assistant"
        runner, own = sizes.runner, self.assistant.config.get_text_config()
        if runner is None:
            raise ValueError(f"{this} reads the target's keys and values, and there are none here: run an engine")
        if is_divided(target.model):
            raise ValueError(f"{this} reads keys and values on one device, and {that} has them on several")
        text: Any = target.model.config.get_text_config(decoder=True)
        sizes_due = {"hidden_size": self.assistant.config.backbone_hidden_size, "vocab_size": own.vocab_size}
        for what, due in sizes_due.items():
            if getattr(text, what) != due:
                raise ValueError(
                    f"{this} is for targets with {what}={due}, and {that} has {getattr(text, what)}: {remedy}"
                )
        decoder: Any = self.assistant.base_model
        kinds: list[str] = getattr(text, "layer_types", None) or []
        layers = {kinds[layer]: layer for layer in sorted(runner.facts.layers) if layer < len(kinds)}
        for layer in decoder.layers:
            attention = layer.self_attn
            kind, found = attention.layer_type, runner.facts.layers.get(layers.get(attention.layer_type, -1))
            due = own.num_attention_heads // attention.num_key_value_groups, attention.head_dim
            has = None if found is None else (found.key_heads, found.key_dim)
            if has != due:
                stated = "no such layers" if has is None else "{} of {}".format(*has)
                raise ValueError(
                    f"{this} reads layers of the kind {kind} with {due[0]} key heads of {due[1]} channels, and {that} "
                    f"has {stated}: {remedy}"
                )
        used = {kind: layers[kind] for kind in sorted(set(own.layer_types))}
        # A place behind the committed positions sees as many of them as the window says, and one: transformers counts
        # distances from the last committed position, inclusively.
        window = {"sliding_attention": Reach(own.sliding_window + 1)}
        return TargetKeys(runner, used, {kind: window.get(kind, Reach()) for kind in used})


class TargetKeys:
    """Answers a drafting model's attention calls with what some layers of the target have stored.

    All nodes of a draft stand at one place, behind the committed positions, and see these alone. So a level's nodes are
    one query with more heads, and the cache is read once for all of them.

    Args:
        runner: Runs the target. Nothing is written to its cache.
        layers: The layer that is read, by a name that the model has for it.
        reaches: How far back is seen, by the same names.

    Attributes:
        stand_ins: The keys and values that the model is given, by which calls are recognized.
    """

    def __init__(self, runner: ModelRunner, layers: Mapping[str, int], reaches: Mapping[str, Reach]):
        self._runner, self._facts = runner, replace(runner.facts, reaches=dict(reaches))
        self._backend = BACKENDS["grouped"] if runner.backend.passes_cache else runner.backend
        self._chain = Topology.chain(1, runner.device)
        self.stand_ins: dict[str, tuple[Tensor, Tensor]] = {}
        self._known: dict[int, tuple[int, int]] = {}
        for name, layer in layers.items():
            shape = runner.facts.layers[layer]
            with torch.inference_mode(False):
                key, value = torch.zeros(2, 1, shape.key_heads, 1, 1, device=runner.device)
            self.stand_ins[name] = key, value
            self._known[id(key)] = layer, self._facts.distinct_reaches.index(reaches[name])

    @property
    def version(self) -> int:
        return self._runner.version

    def aim(self, batch: Batch) -> None:
        """Prepare for the drafts of a round: the rows' last committed positions, and what these see."""
        last = (batch.lengths - 1).clamp_(min=0)
        forward = ForwardBatch(
            tokens=batch.roots[:, None],
            slots=batch.slots,
            lengths=last,
            topology=self._chain,
            key_bound=batch.key_bound,
        )
        self._runner.cache.aim(forward)
        self._view = self._backend.prepare(forward, self._runner.cache, self._facts)

    def answering(self) -> AbstractContextManager[object]:
        """During the ``with`` block, answer attention calls whose keys are stand-ins."""
        return answered_by(self._answer)

    def _answer(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: object) -> Tensor:
        layer, reach = self._known[id(key)]
        rows, heads, nodes, width = query.shape
        folded = query.reshape(rows, heads * nodes, 1, width)
        call = AttentionCall(folded, key, value, layer, reach, *options)  # type: ignore[arg-type]
        output = self._backend.attend(call, self._view)
        return output.reshape(rows, heads, nodes, -1).transpose(1, 2)


class AssistantStep(nn.Module):
    """One step of an assistant, for all nodes of a level."""

    max_depth = None

    def __init__(self, assistant: Any, keys: TargetKeys):
        super().__init__()
        self.assistant, self.vocab_size = assistant, assistant.config.get_text_config().vocab_size
        self.hidden_size = assistant.config.backbone_hidden_size
        self._keys, self._configs = keys, configs_of(assistant)

    def forward(
        self,
        embeds: Float[Tensor, "batch node hidden"],
        states: Float[Tensor, "batch node hidden"],
        positions: Int[Tensor, "batch node"],
    ) -> tuple[Float[Tensor, "batch node hidden"], Float[Tensor, "batch node vocab"]]:
        """Returns the next states and the logits of the tokens that follow."""
        joined = self.assistant.pre_projection(torch.cat([embeds, states], -1))
        with switched(self._configs, NAME, "eager"), self._keys.answering():
            output = self.assistant.base_model(
                inputs_embeds=joined,
                attention_mask=dict.fromkeys(self._keys.stand_ins),
                position_ids=positions,
                shared_kv_states=self._keys.stand_ins,
                use_cache=False,
                output_hidden_states=True,  # transformers 5.23 would cut what is not there
            )
        last = output.last_hidden_state
        return self.assistant.post_projection(last), self._logits(last)

    def _logits(self, last: Float[Tensor, "batch node width"]) -> Float[Tensor, "batch node vocab"]:
        """Returns logits, -inf outside of the nearest clusters, where transformers' number depends on the batch."""
        clusters, output = self.assistant.masked_embedding, self.assistant.lm_head
        if clusters is None:
            return output(last)
        nearest = clusters.centroids(last).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
        tokens = clusters.token_ordering.long().view(clusters.num_centroids, -1)[nearest].flatten(2)
        scores = (output.weight[tokens] @ last[..., None]).squeeze(-1)
        return scores.new_full((*last.shape[:2], self.vocab_size), -torch.inf).scatter(-1, tokens, scores)


class AssistantScorer(LastStateScorer):
    """Scores a node's children by a step from the node's token and its parent's state."""

    def __init__(self, *, keys: TargetKeys, embed: Any, max_shown: int, **places: Any):
        super().__init__(**places)
        self._keys, self._embed, self._max_shown = keys, embed, max_shown

    def prepare(self, batch: Batch) -> Hashable:
        return self._keys.version, super().prepare(batch)

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        newest = self.newest[batch.slots][:, None]
        self._keys.aim(batch)
        self._states = newest.new_zeros(len(batch), 1 + self._max_shown, newest.shape[2])  # behind every node
        return self._step(batch, batch.roots[:, None], newest, slice(0, 1))

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Tensor:
        nodes = slice(topology.width - tokens.shape[1], topology.width)
        parents = topology.parents[:, nodes].expand(len(batch), -1)
        return self._step(batch, tokens, take(self._states, parents), nodes)

    def _step(self, batch: Batch, tokens: Tensor, states: Tensor, nodes: slice) -> Tensor:
        positions = batch.lengths[:, None].expand(-1, tokens.shape[1])
        self._states[:, nodes], logits = self.heads(self._embed(tokens).to(states.dtype), states, positions)
        return logits


@contextmanager
def buildable() -> Iterator[None]:
    """Build models, in the ``with`` block, without the layer that stores what others read (transformers 5.23 asks)."""
    text: Any = Gemma4TextConfig
    given: Any = vars(text).get("kv_sharing_modes")
    if given is None:
        yield
        return

    def modes(config: Any) -> list[str | None]:
        count = config.num_hidden_layers
        return ["reuse"] * count if config.num_kv_shared_layers == count else given.fget(config)

    text.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        text.kv_sharing_modes = given
