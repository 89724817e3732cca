"""Runs any Hugging Face causal LM over the slot cache: prefill of prompt chunks, and one forward over draft trees.

The model's own code is used as it is. It is given a cache object that stores what it computes in our layout, a
complete additive mask, and explicit position ids; nothing of it is copied or patched.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from specdec.attention import grouped
from specdec.attention.mask import row_mask, tree_mask
from specdec.cache.slots import ShapeProbe, SlotCache, UnsupportedError
from specdec.execution.packing import PackedLinears, packed_linears
from specdec.execution.recording import NAME as RECORDED
from specdec.execution.recording import Program, RecordingCache, record, recordable
from specdec.modeling.support import (
    Reach,
    check_length,
    check_supported,
    differs,
    explain,
    position_limit,
    reaches,
    recorded_masks,
)
from specdec.quantization.base import weights_read
from specdec.tree import DraftTree, TreeShape
from specdec.types import TargetOutput

logger = logging.getLogger(__name__)

ATTENTION = ("auto", "grouped", "eager")

# The trial of a model: two rows of tokens with prefixes of different lengths, and behind each a tree in which the
# row's next tokens are a path among others (nodes 0, 2, 4).
TRIAL_LENGTH = 7
TRIAL_PREFIXES = (4, 2)
TRIAL_SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)])
TRIAL_PATH = [0, 2, 4]

# How experts are run, if they were loaded as "eager": by a kernel that does not synchronize. Where no kernel works,
# by their own loop.
EXPERTS = ("grouped_mm", "eager")

RECORD_AFTER = 24
"""Forwards of one shape before it is recorded: recording costs what about as many replays save."""


class ModelRunner:
    """A model, its KV cache, and the two forwards that decoding needs.

    Args:
        model: A loaded causal LM. Its attention implementation is switched during our forwards only.
        max_batch_size: Slots of the cache.
        max_length: Committed positions per slot; at most what the model's positions allow.
        max_nodes: Drafted nodes per tree at most.
        attention: ``"grouped"`` (our function, where the model takes one), ``"eager"`` (the model's own), or
            ``"auto"`` for the first of them that the model supports.
        hidden_layers: Hidden states to return (``Drafter.hidden_layers``).
        optimize: On a CPU, pack linear weights and record forwards (``specdec/execution``);
            False runs the model's own code throughout.

    Attributes:
        cache: The KV cache.
        vocab_size: Width of the logits.

    Raises:
        ValueError: The model cannot be supported (with its type and the reason), the length is beyond it, or the
            cache does not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int,
        max_length: int,
        max_nodes: int = 0,
        attention: str = "auto",
        hidden_layers: tuple[int, ...] = (),
        optimize: bool = True,
    ):
        config = model.config.get_text_config(decoder=True)
        choices = _choices(model, attention)
        check_supported(model)
        check_length(config, max_length)
        self.model = model
        self.config = config
        self.device = model.device
        self.dtype = model.dtype
        self.max_length = max_length
        self.max_nodes = max_nodes
        self.hidden_layers: tuple[int, ...] = ()  # none in the trial
        output = model.get_output_embeddings()
        assert output is not None, "check_supported has refused the model"
        self.vocab_size = output.weight.shape[0]
        self._configs = _configs(model)
        self._modules = list(model.modules())
        self._packed = packed_linears(model) if optimize else PackedLinears(nn.Identity())
        self._optimize = optimize
        self._masks: list[Tensor] = []  # of the forward that runs, in the order of self._reach
        self._programs: dict[tuple[int, int], Program | None] = {}
        self._forwards: Counter[tuple[int, int]] = Counter()
        self._state = self._model_state()
        self._settled = False
        probe = self._settle(choices)
        self._last_position = max_length - 1
        self.cache = self._make_cache(probe, max_batch_size=max_batch_size, max_length=max_length, max_nodes=max_nodes)
        self.hidden_layers = hidden_layers
        self._settled = True

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV cache per position and slot."""
        return self.cache.bytes_per_position

    def weight_bytes(self, rows: int = 1) -> int:
        """Bytes of weights that a forward of this many tokens reads at least once (``weights_read``)."""
        return weights_read(self.model, rows).bytes

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Int[Tensor, "batch query"],
        starts: np.ndarray,
        counts: np.ndarray,
        *,
        first_slot: int = 0,
    ) -> dict[int, Float[Tensor, "batch query hidden"]]:
        """Append pieces of prompts to consecutive slots; returns the hidden states that were asked for.

        Args:
            tokens: Padded at the end.
            starts: Tokens that each row has in the cache already.
            counts: How many of the tokens are real. Padding is written behind them and never read.
            first_slot: Slot of row 0.
        """
        batch, queries = tokens.shape
        start = torch.from_numpy(starts).to(self.device, non_blocking=True)
        offsets = torch.arange(queries, device=self.device)
        visible = (offsets[:, None] >= offsets).expand(batch, -1, -1)
        output = self._forward(
            tokens,
            slots=slice(first_slot, first_slot + batch),
            starts=start,
            host_starts=starts,
            cells=offsets.expand(batch, -1),
            visible=visible,
            cell_positions=start[:, None] + offsets,
            query_positions=start[:, None] + offsets,
            with_logits=False,
        )
        return output.hidden_states  # type: ignore[return-value]

    @torch.inference_mode()
    def verify(
        self, tree: DraftTree, lengths: Int[Tensor, " batch"], host_lengths: np.ndarray, *, first_slot: int = 0
    ) -> TargetOutput:
        """One forward over all nodes of a batch of trees; their keys and values go behind each row's prefix.

        Args:
            tree: Row b belongs to slot ``first_slot + b``.
            lengths: Tokens that each row has in the cache: the root's position.
            host_lengths: The same on the host.
            first_slot: Slot of row 0.
        """
        batch, nodes = tree.tokens.shape
        positions = lengths[:, None] + tree.depth
        return self._forward(
            tree.tokens,
            slots=slice(first_slot, first_slot + batch),
            starts=lengths,
            host_starts=host_lengths,
            cells=torch.arange(nodes, device=self.device).expand(batch, -1),
            visible=tree.ancestors,
            cell_positions=positions,
            query_positions=positions,
        )

    @torch.inference_mode()
    def verify_level(
        self,
        tokens: Int[Tensor, "batch query"],
        lengths: Int[Tensor, " batch"],
        host_lengths: np.ndarray,
        *,
        cells: Int[Tensor, " query"],
        depths: Int[Tensor, " cell"],
        ancestors: Bool[Tensor, "query cell"],
        sees_all: bool = False,
    ) -> Float[Tensor, "batch query vocab"]:
        """A forward over some nodes of trees whose nodes above are in the cache already; returns logits.

        How a model that drafts a tree of a static shape goes down it level by level.

        Args:
            tokens: Tokens of the nodes.
            lengths: The root's position in each row.
            host_lengths: The same on the host.
            cells: The nodes' indices in the tree (consecutive, the last of those in ``depths``).
            depths: Depths of all nodes up to the last of these.
            ancestors: Which nodes each of these sees, itself included.
            sees_all: Every one of them sees all, which saves a mask.
        """
        batch, queries = tokens.shape
        positions = lengths[:, None] + depths
        return self._forward(
            tokens,
            slots=slice(0, batch),
            starts=lengths,
            host_starts=host_lengths,
            cells=cells.expand(batch, -1),
            visible=ancestors.expand(batch, -1, -1),
            cell_positions=positions,
            query_positions=positions[:, -queries:],
            sees_all=sees_all,
        ).logits

    def _forward(
        self,
        tokens: Int[Tensor, "batch query"],
        *,
        slots: slice,
        starts: Int[Tensor, " batch"],
        host_starts: np.ndarray,
        cells: Int[Tensor, "batch query"],
        visible: Bool[Tensor, "batch query cell"],
        cell_positions: Int[Tensor, "batch cell"],
        query_positions: Int[Tensor, "batch query"],
        sees_all: bool = False,
        with_logits: bool = True,
    ) -> TargetOutput:
        batch, queries = tokens.shape
        num_cells = visible.shape[2]
        # Prefill pads short prompts beside long ones: padding that would fall off the row's end stays at its end.
        length = min(int(host_starts.max()) + num_cells, self.cache.positions)
        # The queries are the last cells, in order.
        first = int(host_starts[0]) + num_cells - queries
        where = first if batch == 1 else (starts[:, None] + cells).clamp(max=self.cache.positions - 1)
        self.cache.aim(slots, where, length=length)
        self._masks[:] = [
            self._mask(reach, starts, host_starts, visible, length, query_positions, cell_positions, sees_all)
            for reach in self._reach
        ]
        # Padding and invalid nodes may stand past the last position, where learned embeddings have no row.
        positions = query_positions.clamp(max=self._last_position)
        if not with_logits:
            hidden = self._eager(self.model.base_model, tokens, positions, self.attention, self.cache)
            no_logits = tokens.new_zeros(batch, queries, 0, dtype=self.dtype)
            # Not strict: where a model is its own base model (Llama-4's text model), logits follow.
            return TargetOutput(logits=no_logits, hidden_states=dict(zip(self.hidden_layers, hidden, strict=False)))
        outputs = self._run(tokens, positions)
        return TargetOutput(logits=outputs[-1], hidden_states=dict(zip(self.hidden_layers, outputs, strict=False)))

    def _run(self, tokens: Tensor, positions: Tensor) -> Sequence[Tensor]:
        """The model, recorded or not: the hidden states that were asked for, then the logits."""
        program = self._programs.get((tokens.shape[0], tokens.shape[1]))
        if program is not None:
            return program(tokens, positions)
        outputs = self._eager(self.model, tokens, positions, self.attention, self.cache)
        self._consider_recording(tokens, positions, outputs)
        return outputs

    def _mask(
        self,
        reach: Reach,
        starts: Int[Tensor, " batch"],
        host_starts: np.ndarray,
        visible: Bool[Tensor, "batch query cell"],
        length: int,
        query_positions: Int[Tensor, "batch query"],
        cell_positions: Int[Tensor, "batch cell"],
        sees_all: bool,
    ) -> Float[Tensor, "batch 1 grouped_query key"]:
        """The mask of the layers of one reach, its rows repeated for the query heads of a group."""
        if len(starts) == 1 and reach == Reach():
            return row_mask(int(host_starts[0]), visible[0], length, self.dtype, groups=self._groups, sees_all=sees_all)
        mask = tree_mask(
            starts,
            visible,
            length,
            self.dtype,
            query_positions=query_positions,
            cell_positions=cell_positions,
            window=reach.window,
            chunk=reach.chunk,
        )
        return mask.repeat(1, 1, self._groups, 1) if self._groups > 1 else mask

    def _eager(self, model: nn.Module, tokens: Tensor, positions: Tensor, attention: str, cache: Cache) -> list[Tensor]:
        """Hidden states that were asked for, and logits if the model has an output layer."""
        masks = dict(zip(self._reach, self._masks, strict=True))
        by_type = {layer_type: masks[reach] for layer_type, reach in self._reaches.items()}
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            # A dict where layers differ, as such models expect it; the one mask otherwise.
            "attention_mask": by_type if len(by_type) > 1 else next(iter(by_type.values())),
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
        }
        if any(layer != -1 for layer in self.hidden_layers):
            inputs["output_hidden_states"] = True
        with _switched(self._configs, attention, self._experts), self._packed.in_use(), self._last_hidden() as last:
            output = model(**inputs)
        if "logits" not in output:
            last = [output.last_hidden_state]
        # The output layer's input is the normalized last hidden state.
        hidden = [last[0] if layer == -1 else output.hidden_states[layer] for layer in self.hidden_layers]
        return [*hidden, output.logits] if "logits" in output else hidden

    @contextmanager
    def _last_hidden(self) -> Iterator[list[Tensor]]:
        """Catches what the output layer is given."""
        caught: list[Tensor] = []
        if -1 not in self.hidden_layers:
            yield caught
            return
        output = self.model.get_output_embeddings()
        assert output is not None, "check_supported has refused the model"
        handle = output.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
        try:
            yield caught
        finally:
            handle.remove()

    def refresh(self) -> None:
        """Notice a model that was changed since the last request: its weights, modules or hooks.

        To be called before a request begins.
        """
        state = self._model_state()
        if state != self._state:
            self._programs.clear()
            self._state = state

    def _model_state(self) -> tuple[object, ...]:
        """What a recording depends on, apart from the values of parameters (which it reads) and of packed weights."""
        parameters = tuple(id(p) for module in self._modules for p in module._parameters.values())
        return self._packed.refresh(), recordable(self._modules), parameters

    def _consider_recording(self, tokens: Tensor, positions: Tensor, outputs: list[Tensor]) -> None:
        """Record a shape that comes often, if the recording gives what the model has just given."""
        shape = (tokens.shape[0], tokens.shape[1])
        self._forwards[shape] += 1
        if self._forwards[shape] < RECORD_AFTER or shape in self._programs or not self._can_record():
            return
        self._programs[shape] = None
        cache = RecordingCache(len(self.cache.layers), self._masks)
        attend = _attend(self.cache, self._masks)
        try:
            program = record(
                lambda tokens, positions: self._eager(self.model, tokens, positions, RECORDED, cache),
                (tokens + 1) % self.vocab_size,
                (positions + 1).clamp(max=self._last_position),
                cache=cache,
                attend=attend,
                joint=self._packed.joint,
            )
            # The same tokens again: the cache is given what it has.
            if all(torch.equal(a, b) for a, b in zip(program(tokens, positions), outputs, strict=True)):
                self._programs[shape] = program
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model does that tracing does not take; it runs as it is
            logger.debug("%s is not recorded: %s", self.model.config.model_type, error)

    def _can_record(self) -> bool:
        on_cpu = self.device.type == "cpu"  # a GPU hides the Python between its kernels, or has graphs of its own
        return self._optimize and self._settled and on_cpu and self.attention == grouped.NAME and bool(self._state[1])

    @torch.inference_mode()
    def _probe(self) -> tuple[ShapeProbe, Tensor]:
        """The model's own forward, which also shows what it keeps in a cache and which masks it makes.

        Returns:
            What it keeps, and the logits.
        """
        probe = ShapeProbe(getattr(self.config, "num_hidden_layers", 1))
        # SDPA leaves out softcaps and sinks in some versions; a model's own attention is what it means.
        with _switched(self._configs, "eager", self._experts), recorded_masks(self._configs) as asked:
            output = self.model(input_ids=self._trial_tokens(), past_key_values=probe, use_cache=True)
        self._reaches = reaches(self.config, asked)
        self._reach = list(dict.fromkeys(self._reaches.values()))
        return probe, output.logits

    def _trial_tokens(self) -> Int[Tensor, "batch position"]:
        """Two rows of distinct tokens, none of the ids at either end, where special tokens stand."""
        length = min(TRIAL_LENGTH, position_limit(self.config) or TRIAL_LENGTH)
        ids = torch.arange(2 * length, device=self.device).view(2, length)
        return (101 + 37 * ids) % min(self.vocab_size, self.config.vocab_size)

    def _settle(self, choices: list[str]) -> ShapeProbe:
        """Find a way to run the model that gives its own logits; what a model type needs cannot be known for all.

        Costs the model's own forward and three over a small cache, of a few tokens each.

        Raises:
            ValueError: There is none.
        """
        attempts = [(choice, experts) for choice in choices for experts in EXPERTS]
        finding = ""
        cause: Exception | None = None
        probe = None
        for self.attention, self._experts in attempts:
            try:
                if probe is None:
                    probe, own = self._probe()
                error = self._trial(probe, own)
                if error is None:
                    return probe
                problem = f"its logits differ by {error:.0%} from the model's own"
            except torch.OutOfMemoryError:
                raise
            except Exception as exception:  # whatever a model raises is the reason to refuse it
                cause = exception
                first_line = str(exception).strip().split("\n", 1)[0]
                problem = (
                    first_line if isinstance(exception, ValueError) else f"{type(exception).__name__}: {first_line}"
                )
            finding = finding or problem
        raise ValueError(explain(self.model, finding)) from cause

    def _trial(self, probe: ShapeProbe, own: Float[Tensor, "batch position vocab"]) -> float | None:
        """A ragged prefill, one token and a branching tree; how far their logits are from the model's own."""
        tokens = self._trial_tokens()
        if tokens.shape[1] < TRIAL_LENGTH:
            return None
        self.cache = self._make_cache(probe, max_batch_size=2, max_length=TRIAL_LENGTH, max_nodes=TRIAL_SHAPE.num_nodes)
        self._groups, self._last_position = 1, TRIAL_LENGTH - 1
        lengths = np.array(TRIAL_PREFIXES)
        starts = torch.tensor(TRIAL_PREFIXES, device=self.device)
        path = starts[:, None] + torch.arange(-1, len(TRIAL_PATH), device=self.device)
        with grouped.recorded_groups() as groups:
            self.prefill(tokens[:, : lengths.max() - 1], np.zeros_like(lengths), lengths - 1)
        self._groups = max(set(groups), key=groups.count, default=1)
        before = DraftTree.root_only(tokens.gather(1, path[:, :1])[:, 0])
        nodes = tokens[:, :1].repeat(1, TRIAL_SHAPE.num_nodes + 1)
        nodes[:, TRIAL_PATH] = tokens.gather(1, path[:, 1:])
        single = self.verify(before, starts - 1, lengths - 1).logits
        logits = self.verify(DraftTree.from_shape(TRIAL_SHAPE, nodes), starts, lengths).logits
        logits = torch.cat([single, logits[:, TRIAL_PATH]], dim=1)
        if self.cache.length_used and not getattr(self.config, "attn_temperature_tuning", False):  # see check_length
            raise UnsupportedError("its layers count positions from the length of the cache, which a batch has not")
        wanted = own.gather(1, path[:, :, None].expand(-1, -1, own.shape[2]))
        precise = self.dtype in (torch.float32, torch.float64) and not getattr(self.model, "is_quantized", False)
        return differs(logits, wanted, precise=precise)

    def _make_cache(self, probe: ShapeProbe, *, max_batch_size: int, max_length: int, max_nodes: int) -> SlotCache:
        return SlotCache(
            probe.shapes,
            max_batch_size=max_batch_size,
            max_length=max_length,
            max_nodes=max_nodes,
            device=self.device,
            indexers=probe.indexers,
        )


def _choices(model: PreTrainedModel, attention: str) -> list[str]:
    """Attention implementations to try, in order."""
    if attention not in ATTENTION:
        raise ValueError(f"attention={attention!r}: give one of {', '.join(ATTENTION)}")
    takes_ours = getattr(model, "_supports_attention_backend", False)
    if attention == "grouped" and not takes_ours:
        raise ValueError(f"{model.config.model_type} does not take an attention function: use attention='auto'")
    if attention == "eager" or not takes_ours:
        return ["eager"]
    return [grouped.NAME] if attention == "grouped" else [grouped.NAME, "eager"]


def _attend(cache: SlotCache, masks: list[Tensor]) -> Callable[..., Tensor]:
    """A layer's attention in a recorded forward (see ``record``): over this cache, with the masks of the moment."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: int,
        mask: int,
        scaling: float | None,
        softcap: float | None,
    ) -> Tensor:
        keys, values = cache.update(key, value, layer)
        return grouped.attend(query, keys, values, masks[mask], scaling=scaling, softcap=softcap, sinks=sinks)

    return attend


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration that a part of the model reads: parts may have one of their own."""
    found = [getattr(part, "config", None) for part in model.modules()]
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


@contextmanager
def _switched(configs: list[PreTrainedConfig], attention: str, experts: str) -> Iterator[None]:
    """Switch a model's attention, and experts that would synchronize, for the time of a forward."""
    # The fields behind the properties: setting those also sets the configurations below.
    before = [(c, c._attn_implementation_internal, c._experts_implementation_internal) for c in configs]
    for config, _, own_experts in before:
        config._attn_implementation_internal = attention
        if "eager" in (experts, own_experts):
            config._experts_implementation_internal = experts
    try:
        yield
    finally:
        for config, own_attention, own_experts in before:
            config._attn_implementation_internal = own_attention
            config._experts_implementation_internal = own_experts
