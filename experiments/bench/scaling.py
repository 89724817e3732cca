"""How a round's cost grows: ``python -m experiments.bench scaling out=FOLDER`` measures and draws one plot per axis.

A round is one verify forward and its acceptance (rejection sampling at temperature 1, i.i.d. drafts). Beside the
measured time each plot shows two lines. Dashed: the bytes that the round has to move (weights, the rows' keys and
values, logits and probability tables), scaled to the first point; where memory is the limit, the engine should not grow
faster. Dotted: the same and the round's arithmetic at the speed of a large matrix product, which is added because a
CPU is soon limited by it (some 16 tokens per forward in bfloat16): that line is what a CPU cannot beat by much.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import EngFormatter, MaxNLocator
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.bench.options import option, read_options
from experiments.reporting import terminal
from experiments.reporting.table import Column, Table
from specdec.acceptance import accept
from specdec.forward import ForwardBatch
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from verifiers import RejectionVerifier


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
    """Twelve layers of 768 channels, grouped-query attention, bf16, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=setting.vocab, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def round_of(model: LlamaForCausalLM, setting: Setting) -> tuple[Callable[[], object], float, float]:
    """A function that does one round, the bytes that it has to move, and its operations (a product and a sum: two)."""
    runner = ModelRunner(
        model, max_batch_size=setting.batch, max_length=setting.context + setting.nodes + 2, max_nodes=setting.nodes
    )
    shape = TreeShape.chain(setting.nodes)
    slots, lengths = np.arange(setting.batch), np.full(setting.batch, setting.context)
    tokens = torch.randint(0, setting.vocab, (setting.batch, setting.nodes + 1))
    q = torch.full((setting.batch, setting.nodes + 1, setting.vocab), 1 / setting.vocab)
    tree = DraftTree.from_shape(shape, tokens, sampling=DraftSampling.IID, draft_probs=q)
    uniforms = torch.rand(setting.batch, 2, dtype=torch.float64)
    verifier = RejectionVerifier()

    @torch.inference_mode()
    def one_round() -> object:
        logits = runner.run(ForwardBatch.of_tree(tree, host_slots=slots, host_lengths=lengths)).scores
        return accept(verifier, tree, logits.float().softmax(-1), uniforms)

    weights = runner.weight_bytes(tokens.numel())
    keys_values = runner.bytes_per_token * setting.batch * (setting.context + setting.nodes + 1)
    # bf16 logits once; float32 probabilities written and read.
    tables = setting.batch * (setting.nodes + 1) * setting.vocab * (2 + 4 + 4 + 4)
    rows, config = tokens.numel(), model.config
    products = 2 * rows * sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    length = setting.context + setting.nodes + 1
    attention = 4 * rows * length * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return one_round, weights + keys_values + tables, products + attention


def operations_per_millisecond() -> float:
    """The speed of a large product of bfloat16 matrices."""
    a, b = torch.randn(1024, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    return 2 * 1024 * 2048 * 2048 / milliseconds(lambda: a @ b, 9)


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of a call."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


@dataclass(frozen=True)
class Options:
    """The command line."""

    out: Path = option(Path("outputs/scaling"), "folder for scaling.png")
    repeats: int = option(7, "rounds that are timed at each point", least=1)


def main() -> None:
    """Measure every axis, print a table, and write ``scaling.png``."""
    arguments = read_options(Options, __doc__)
    arguments.out.mkdir(parents=True, exist_ok=True)
    speed = operations_per_millisecond()
    headings = ("value", "round (ms)", "MB moved", "GFLOP", "ms per MB", "of bytes and arithmetic")
    table = Table([Column("axis", "left"), *(Column(heading) for heading in headings)])
    plt.switch_backend("Agg")
    figure, panels = plt.subplots(1, len(AXES), figsize=(15, 3.6), constrained_layout=True)
    for (axis, (label, values)), panel in zip(AXES.items(), panels, strict=True):
        measured, moved, computed = [], [], []
        model = model_for(Setting())
        for value in values:
            setting = Setting(**{axis: value})
            model = model_for(setting) if axis == "vocab" else model
            one_round, size, operations = round_of(model, setting)
            measured.append(milliseconds(one_round, arguments.repeats))
            moved.append(size)
            computed.append(operations)
        by_bytes = np.array(moved) * measured[0] / moved[0]
        arithmetic = (np.array(computed) - computed[0]) / speed
        for i, value in enumerate(values):
            relative = measured[i] / by_bytes[i], measured[i] / (by_bytes[i] + arithmetic[i])
            table.add(
                axis, str(value), f"{measured[i]:.1f}", f"{moved[i] / 1e6:.0f}", f"{computed[i] / 1e9:.1f}",
                *[f"{ratio:.2f}" for ratio in relative],
            )  # fmt: skip
        panel.plot(values, measured, "o-", label="measured")
        panel.plot(values, by_bytes, "--", color="gray", label="bytes to move (scaled)")
        panel.plot(values, by_bytes + arithmetic, ":", color="black", label="bytes and arithmetic")
        panel.set_xlabel(label)
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.set_title(f"cost by {label}", fontsize=10)
    panels[0].set_ylabel("one round (ms)")
    panels[0].legend(fontsize=8)
    figure.suptitle(
        f"One verify round of a random 110M Llama in bf16, {torch.get_num_threads()} CPU threads", fontsize=11
    )
    figure.savefig(arguments.out / "scaling.png", dpi=120)
    terminal.console().print(terminal.render(table))
    print(f"wrote {arguments.out / 'scaling.png'}")


if __name__ == "__main__":
    main()
