"""How a round's cost grows: ``out=FOLDER`` measures and draws one plot per axis.

A round is one verify forward and its acceptance (rejection sampling at temperature 1, i.i.d. drafts). Beside the
measured time each plot shows two lines. Dashed: the bytes that the round has to move (weights, the rows' keys and
values, logits and probability tables), scaled to the first point; where memory is the limit, the engine should not grow
faster. Dotted: the same and the round's arithmetic at the speed of a large matrix product, which is added because a
CPU is soon limited by it (some 16 tokens per forward in bfloat16): that line is what a CPU cannot beat by much.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from experiments.bench.models import llama_110m
from experiments.bench.options import option, read_options
from experiments.bench.timing import show, timed
from experiments.reporting import style
from specdec.acceptance import accept
from specdec.forward import ForwardBatch
from specdec.physics.reading import read_shape
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from verifiers import RejectionVerifier

USUAL = {"context": 256, "batch": 1, "nodes": 8, "vocab": 32000}
"""Tokens in the cache per row, rows, drafted nodes, vocabulary."""
AXES: dict[str, tuple[str, list[int]]] = {
    "context": ("tokens in the cache", [128, 512, 1024, 2048, 4096, 8000]),
    "batch": ("rows", [1, 2, 4, 8, 16]),
    "nodes": ("drafted nodes", [1, 4, 8, 16, 32, 64]),
    "vocab": ("vocabulary", [4000, 16000, 32000, 64000, 128000]),
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    out: Path = option(Path("outputs/scaling"), "folder for scaling.png")
    repeats: int = option(7, "rounds that are timed at each point", least=1)


def model_for(vocab: int) -> LlamaForCausalLM:
    """Return twelve layers of 768 channels, grouped-query attention, bf16, random weights."""
    return llama_110m(vocab, num_key_value_heads=4, tie_word_embeddings=False)


def round_of(
    model: LlamaForCausalLM, *, context: int, batch: int, nodes: int, vocab: int
) -> tuple[Callable[[], object], float, float]:
    """Return a round as a function, the bytes that it has to move, and its operations."""
    length = context + nodes + 1
    runner = ModelRunner(model, max_batch_size=batch, max_length=length + 1, max_nodes=nodes)
    tokens = torch.randint(0, vocab, (batch, nodes + 1))
    q = torch.full((batch, nodes + 1, vocab), 1 / vocab)
    tree = DraftTree.from_shape(TreeShape.chain(nodes), tokens, sampling=DraftSampling.IID, draft_probs=q)
    forward = ForwardBatch.of_tree(tree, host_slots=np.arange(batch), host_lengths=np.full(batch, context))
    uniforms = torch.rand(batch, 2, dtype=torch.float64)

    @torch.inference_mode()
    def one_round() -> object:
        return accept(RejectionVerifier(), tree, runner.run(forward).scores.float().softmax(-1), uniforms)

    shape, rows = read_shape(model.config), tokens.numel()
    # bf16 logits once; float32 probabilities written and read.
    moved = runner.weight_bytes(rows) + runner.bytes_per_token * batch * length + rows * vocab * (2 + 4 + 4 + 4)
    products = 2 * rows * (shape.layer_weights + shape.output_weights)
    return one_round, moved, products + rows * length * shape.pair_flops


def main() -> None:
    """Measure every axis, print a table, and write ``scaling.png``."""
    given = read_options(Options, __doc__)
    given.out.mkdir(parents=True, exist_ok=True)
    a, b = torch.randn(1024, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    speed = 2 * 1024 * 2048 * 2048 / timed(lambda: a @ b, repeats=9)["seconds"]  # of a large product
    rows: list[dict[str, str]] = []
    with style.styled():
        figure = style.new_figure(style.PAGE, 2.4)
        for (axis, (label, values)), panel in zip(AXES.items(), figure.subplots(1, len(AXES)), strict=True):
            found: list[tuple[float, float, float]] = []
            model = model_for(USUAL["vocab"])
            for value in values:
                model = model_for(value) if axis == "vocab" else model
                one_round, size, operations = round_of(model, **{**USUAL, axis: value})
                seconds = timed(one_round, repeats=given.repeats, limit=1e9, warm_up=1)["seconds"]
                found.append((seconds, size, operations))
            measured, moved, computed = np.array(found).T
            by_bytes = moved * measured[0] / moved[0]
            bound = by_bytes + (computed - computed[0]) / speed
            rows += [
                {
                    "axis": axis, "value": str(value), "round (ms)": f"{1e3 * measured[i]:.1f}",
                    "MB moved": f"{moved[i] / 1e6:.0f}", "GFLOP": f"{computed[i] / 1e9:.1f}",
                    "ms per MB": f"{measured[i] / by_bytes[i]:.2f}",
                    "of bytes and arithmetic": f"{measured[i] / bound[i]:.2f}",
                }
                for i, value in enumerate(values)
            ]  # fmt: skip
            panel.plot(values, 1e3 * measured, "o-", label="measured")
            panel.plot(values, 1e3 * by_bytes, "--", color="gray", label="bytes to move (scaled)")
            panel.plot(values, 1e3 * bound, ":", color="black", label="bytes and arithmetic")
            panel.set(xlabel=label, ylim=(0, None))
        figure.axes[0].set_ylabel("one round (ms)")
        style.legend(figure, *figure.axes[0].get_legend_handles_labels())
        threads = torch.get_num_threads()
        style.title(figure, "A round by its sizes", f"a random 110M Llama in bf16, {threads} CPU threads")
        path = style.save(figure, given.out / "scaling.png")
    show("A round by its sizes", rows)
    print(f"wrote {path}")
