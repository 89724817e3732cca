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

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import EngFormatter, MaxNLocator
from transformers import LlamaForCausalLM

from experiments.bench.models import llama_110m
from experiments.bench.options import option, read_options
from experiments.bench.timing import show, timed
from specdec.acceptance import accept
from specdec.forward import ForwardBatch
from specdec.physics.shape import ModelShape
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from verifiers import RejectionVerifier


@dataclass(frozen=True)
class Options:
    """The command line."""

    out: Path = option(Path("outputs/scaling"), "folder for scaling.png")
    repeats: int = option(7, "rounds that are timed at each point", least=1)


@dataclass(frozen=True)
class Setting:
    """One point: tokens in the cache per row, rows, drafted nodes, vocabulary."""

    context: int = 256
    batch: int = 1
    nodes: int = 8
    vocab: int = 32000


AXES: dict[str, tuple[str, list[int]]] = {
    "context": ("tokens in the cache", [128, 512, 1024, 2048, 4096, 8000]),
    "batch": ("rows", [1, 2, 4, 8, 16]),
    "nodes": ("drafted nodes", [1, 4, 8, 16, 32, 64]),
    "vocab": ("vocabulary", [4000, 16000, 32000, 64000, 128000]),
}


def model_for(setting: Setting) -> LlamaForCausalLM:
    """Return twelve layers of 768 channels, grouped-query attention, bf16, random weights."""
    return llama_110m(setting.vocab, num_key_value_heads=4, tie_word_embeddings=False)


def round_of(model: LlamaForCausalLM, setting: Setting) -> tuple[Callable[[], object], float, float]:
    """Return a round as a function, the bytes that it has to move, and its operations."""
    length, nodes = setting.context + setting.nodes + 1, setting.nodes + 1
    runner = ModelRunner(model, max_batch_size=setting.batch, max_length=length + 1, max_nodes=setting.nodes)
    slots, lengths = np.arange(setting.batch), np.full(setting.batch, setting.context)
    tokens = torch.randint(0, setting.vocab, (setting.batch, nodes))
    q = torch.full((setting.batch, nodes, setting.vocab), 1 / setting.vocab)
    tree = DraftTree.from_shape(TreeShape.chain(setting.nodes), tokens, sampling=DraftSampling.IID, draft_probs=q)
    uniforms = torch.rand(setting.batch, 2, dtype=torch.float64)
    verifier = RejectionVerifier()

    @torch.inference_mode()
    def one_round() -> object:
        logits = runner.run(ForwardBatch.of_tree(tree, host_slots=slots, host_lengths=lengths)).scores
        return accept(verifier, tree, logits.float().softmax(-1), uniforms)

    shape, rows = ModelShape.of(model.config), tokens.numel()
    # bf16 logits once; float32 probabilities written and read.
    moved = runner.weight_bytes(rows) + runner.bytes_per_token * setting.batch * length
    moved += rows * setting.vocab * (2 + 4 + 4 + 4)
    products = 2 * rows * (shape.layer_weights + shape.output_weights)
    return one_round, moved, products + rows * length * shape.pair_flops


def main() -> None:
    """Measure every axis, print a table, and write ``scaling.png``."""
    given = read_options(Options, __doc__)
    given.out.mkdir(parents=True, exist_ok=True)
    a, b = torch.randn(1024, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    speed = 2 * 1024 * 2048 * 2048 / timed(lambda: a @ b, repeats=9).seconds  # of a large product
    rows: list[dict[str, str]] = []
    plt.switch_backend("Agg")
    figure, panels = plt.subplots(1, len(AXES), figsize=(15, 3.6), constrained_layout=True)
    for (axis, (label, values)), panel in zip(AXES.items(), panels, strict=True):
        found: list[tuple[float, float, float]] = []
        model = model_for(Setting())
        for value in values:
            setting = Setting(**{axis: value})
            model = model_for(setting) if axis == "vocab" else model
            one_round, size, operations = round_of(model, setting)
            found.append((timed(one_round, repeats=given.repeats, limit=1e9, warm_up=1).seconds, size, operations))
        measured, moved, computed = np.array(found).T
        by_bytes = moved * measured[0] / moved[0]
        bound = by_bytes + (computed - computed[0]) / speed
        for i, value in enumerate(values):
            rows.append(
                {
                    "axis": axis, "value": str(value), "round (ms)": f"{1e3 * measured[i]:.1f}",
                    "MB moved": f"{moved[i] / 1e6:.0f}", "GFLOP": f"{computed[i] / 1e9:.1f}",
                    "ms per MB": f"{measured[i] / by_bytes[i]:.2f}",
                    "of bytes and arithmetic": f"{measured[i] / bound[i]:.2f}",
                }
            )  # fmt: skip
        panel.plot(values, 1e3 * measured, "o-", label="measured")
        panel.plot(values, 1e3 * by_bytes, "--", color="gray", label="bytes to move (scaled)")
        panel.plot(values, 1e3 * bound, ":", color="black", label="bytes and arithmetic")
        panel.set(xlabel=label, ylim=(0, None))
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.set_title(f"cost by {label}", fontsize=10)
    panels[0].set_ylabel("one round (ms)")
    panels[0].legend(fontsize=8)
    threads = torch.get_num_threads()
    figure.suptitle(f"One verify round of a random 110M Llama in bf16, {threads} CPU threads", fontsize=11)
    figure.savefig(given.out / "scaling.png", dpi=120)
    show("A round by its sizes", rows)
    print(f"wrote {given.out / 'scaling.png'}")


if __name__ == "__main__":
    main()
