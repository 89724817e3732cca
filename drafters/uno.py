"""Uno: the target drafts for itself, through a LoRA adapter over noise (Sahoo et al. 2026, arXiv 2609.04010).

A forward holds what became final and the root, which go through the base weights, and a token of noise for every other
depth, which goes through the adapter and predicts the token behind its place. The noise depends on the request and the
round, and on nothing else in the batch.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafters.heads.parallel import FillsMasks, Masked
from drafters.heads.training import Anchors, Borrowed, Prediction, TargetStates, TextBatch, output_of
from drafters.lora import LAYERS, Lora, widths, write_adapter
from drafters.own_model import Options, OwnModelDrafter, Settings
from drafters.reduced import twin_of
from specdec import Batch, Drafter, Sizes, Target
from specdec.arguments import shown, whole
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.scored import ScoredSession
from specdec.drafting.window import ParallelScorer
from specdec.random import Purpose, uniforms
from specdec.target.adapters import Adapters, Matrices

TOKENS = 8


class UnoDrafter(OwnModelDrafter):
    """Drafts with one forward of the target itself, whose noise goes through an adapter.

    It shares the target's weights, and has keys and values of its own for the tokens that became final.

    Args:
        adapter: A folder of a LoRA in peft's layout (or with one in its subfolder ``adapter``), or its matrices.
        shape: What ``TreeShape.of`` takes, or a tree builder. ``ExpansionTree(nodes, depth, width=nodes)`` is the
            authors' tree sampler.
        noise_below: Noise is drawn from the tokens from 1 to below this (the authors' mask token); None for all tokens.
    """

    runs = "target"
    at_once = True

    def __init__(
        self,
        adapter: str | Path | Matrices,
        shape: AnyTree = TOKENS,
        *,
        noise_below: int | None = None,
        **options: Unpack[Options],
    ):
        self.adapter: str | Matrices = adapter if isinstance(adapter, Mapping) else _folder(Path(adapter))
        name = self.adapter if isinstance(self.adapter, str) else "uno"
        options["name"] = options.get("name") or name
        super().__init__(tree_of(shape), **options)
        self.noise_below = None if noise_below is None else whole("noise_below", noise_below, least=2)
        self.has_leaf_probs = self.tree.has_leaf_probs  # a leaf's law is said by one more place

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, shape: AnyTree = TOKENS, noise_below: int | None = None, **options: Unpack[Settings]
    ) -> "UnoDrafter":
        if not any((Path(path) / place / "adapter_config.json").is_file() for place in ("", "adapter")):
            raise ValueError(
                f"no adapter at {shown(path)}: give a folder with adapter_config.json (a downloaded copy of "
                f"s-sahoo/uno-qwen3-8B, say)"
            )
        return cls(path, shape, noise_below=noise_below, **options)

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Put the adapter beside the target's weights, in a model of its own, and allocate a cache."""
        below = target.vocab_size if self.noise_below is None else self.noise_below
        if below > target.vocab_size:
            raise ValueError(
                f"noise_below={below}: the target {target.name} has {target.vocab_size} tokens, give no more"
            )
        twin = twin_of(target.model)
        adapters = Adapters(twin, {"uno": self.adapter})
        model, ids = self.reduced(twin, target)
        runner = self.runner_for(model, "drafter", sizes, max_nodes=self.shown(self.tree), adapters=adapters)

        def noise(batch: Batch, count: int) -> Int[Tensor, "batch place"]:
            numbers = uniforms(batch.keys, batch.lengths, Purpose.LOOK_AHEAD, count)
            return 1 + (numbers * (below - 1)).long()

        scorer = ParallelScorer(
            runner,
            mask_token=0,
            fill=noise,
            adapter=adapters.number("uno"),
            window=self.max_depth + 1,
            max_batch_size=sizes.max_batch_size,
        )
        return ScoredSession(self, scorer, target, sizes, ids=ids)


def _folder(given: Path) -> str:
    inner = given / "adapter"  # as the authors publish theirs
    return str(inner if inner.is_dir() else given)


class TrainedUno(FillsMasks):
    """An adapter, of linear layers whose names end so, that learns to fill places of noise behind the first."""

    title = "adapter (Uno)"
    head: Lora

    def __init__(
        self,
        *,
        depths: int = TOKENS,
        rank: int = 128,
        layers: Iterable[str] = LAYERS,
        keeps: float = 0.7,
        keeps_least: float = 0.2,
        noise_below: int | None = None,
    ):
        super().__init__(depths)
        self.drop(keeps, keeps_least)
        self.rank, self.names = whole("head.rank", rank, least=1), tuple(layers)
        self.noise_below, self._seed = noise_below, 0

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        twin = twin_of(target.model)
        self.head, self.base = Lora(widths(twin, self.names, f"the target {target.name}"), self.rank), target.name
        adapters = Adapters(twin, {"uno": self.head.matrices})
        # In a tuple, or it would be trained, moved and saved.
        self._twin, self._choice = (twin.requires_grad_(False).eval(),), adapters.choice
        self._output = (Borrowed(output_of(target.model)),)
        self._below = target.vocab_size if self.noise_below is None else self.noise_below

    def anchors(self, batch: TextBatch, generator: torch.Generator) -> Anchors:
        self._seed = int(torch.randint(2**62, (), generator=generator))
        return super().anchors(batch, generator)

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        masked = Masked.behind(batch, anchors, before=0)
        (twin,) = self._twin
        shape = len(batch.tokens), masked.masks
        fill = torch.randint(1, self._below, shape, generator=torch.Generator().manual_seed(self._seed))
        numbers = torch.zeros_like(masked.positions)
        numbers[:, batch.tokens.shape[1] :] = 1
        bias = torch.zeros(masked.seen.shape, dtype=twin.dtype, device=masked.seen.device)
        for layer, pair in self.head.matrices.items():
            adapted: Any = twin.get_submodule(layer)
            adapted.down, adapted.up = pair  # in every forward, because FSDP puts other tensors in their place
        self._choice.set(numbers)
        output = twin.base_model(
            input_ids=torch.cat([batch.tokens, fill.to(batch.tokens)], 1),
            attention_mask=bias.masked_fill_(~masked.seen, torch.finfo(twin.dtype).min)[:, None],
            position_ids=masked.positions,
            use_cache=False,
        )
        self._choice.clear()
        return masked.prediction(output.last_hidden_state)

    def logits(self, states: Tensor, previous: Int[Tensor, " place"], depth: int) -> Float[Tensor, "place column"]:
        return self._output[0](states)

    def drafter(self) -> Drafter:
        copies = {
            layer: (down.detach().clone(), up.detach().clone()) for layer, (down, up) in self.head.matrices.items()
        }
        return UnoDrafter(copies, self.depths, noise_below=self.noise_below, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        write_adapter(folder, self.head.matrices, base=self.base)
