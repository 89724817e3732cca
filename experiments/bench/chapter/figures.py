"""The figures that the chapter's sentences name (``{{ f.load | s }}``), each a call of ``specdec.physics``."""

from types import SimpleNamespace
from typing import Any

from experiments.bench.chapter.models import (
    DEEPSEEK_V3,
    GIVEN,
    H100,
    HALF,
    LLAMA_8B,
    LLAMA_70B,
    MISTRAL_7B,
    ROUND_7B,
    ROUND_8B,
    ROUND_15B,
    ROUND_70B,
    ROUND_A100,
    Example,
    forward,
    this_machine,
)  # fmt: skip
from specdec.physics.bounds import Work, bandwidth_utilization, flop_utilization
from specdec.physics.capacity import Served, kv_bytes_per_position, weight_bytes
from specdec.physics.precision import Precision
from specdec.physics.published import LLAMA_8B_H100
from specdec.physics.rounds import RoofRounds
from specdec.physics.serving import all_reduce_seconds, latency, price_per_million
from specdec.physics.shape import Attention, ModelShape
from specdec.physics.speculation import break_even_batch, target_efficiency
from specdec.physics.work import step_work

SMALL = Example(ROUND_8B, ROUND_A100)
"""8 billion parameters on an A100, both in round numbers."""
BIG = Example(ROUND_70B, H100.roof("float16"))
"""70 billion parameters on an H100."""
LLAMA = Example(LLAMA_8B, H100.roof("float16"))
"""Llama-3.1-8B as its configuration says, on an H100."""
SERVED_8B = Served(shape=LLAMA_8B, precision=HALF, activations=0.0, overhead=GIVEN.served_overhead)
"""Llama-3.1-8B with some memory for everything else."""


def figures() -> SimpleNamespace:
    """Return everything that the template names as ``f``."""
    g, chip = GIVEN, H100.chip
    machine, step = this_machine(), SMALL.decode()
    heads, latent = BIG.shape.layers[0].attention, DEEPSEEK_V3.layers[0].attention
    mistral, llama_2 = Example(MISTRAL_7B, ROUND_A100), Example(ROUND_7B, ROUND_A100)
    shared_heads = mistral.shape.layers[0].attention
    assert chip is not None and chip.link is not None and heads is not None and latent is not None
    assert shared_heads is not None
    prefill, behind = SMALL.prefill(g.prompt).seconds, BIG.decode(1, g.long_request)
    read = BIG.prefill(g.long_prompt)
    mistral_cache = g.mistral_rows * g.long_prompt * mistral.kv
    every_head = Attention.grouped(
        weights=0, heads=latent.heads, kv_heads=latent.heads, head_dim=latent.prefill_value_dim
    )
    reduced = all_reduce_seconds(devices=2, tokens=1, hidden=LLAMA_70B.hidden, number_bytes=2, bandwidth=chip.link / 2)
    logits = step_work(LLAMA_8B, HALF, batch=1, context=0).logit_bytes
    plain, verify = LLAMA.decode(1, g.context), LLAMA.decode(1, g.context, g.fixed_draft)
    fp8 = BIG.stored(1.0).decode(g.batches[2], g.long_request)

    def one_matrix(tokens: int) -> SimpleNamespace:
        """A product with one square matrix of Llama-3.1-8B's width."""
        width = LLAMA_8B.hidden
        return forward(Work(bytes=2.0 * width * width, flops=2.0 * tokens * width * width), SMALL.roof, tokens)

    def in_all(example: Example, cache: float) -> list[float]:
        """Weights, cache and activations, from and to."""
        return [example.weight_bytes + cache + size for size in g.activations]

    named: dict[str, Any] = {
        "small": SMALL, "big": BIG, "llama": LLAMA, "h100": H100, "fp8": H100.roof("fp8"), "machine": machine,
        "one_matrix": one_matrix, "in_all": in_all, "hidden": LLAMA_8B.hidden, "vocab": LLAMA_8B.vocab,
    }  # fmt: skip
    return SimpleNamespace(
        **named,
        machine_roof=machine.roof("float32"),
        machine_rows=machine.roof("float32").ridge * Precision.of("float32").weights / 2,
        # A short request: the time to the first token is the prefill and a step, the others are steps.
        request_prefill=prefill,
        request_decode=g.output * step.seconds,
        request_seconds=latency(prefill + step.seconds, step.seconds, g.output),
        # Operations per token over operations per second, which some texts call utilization; and what it is.
        wrong_share=step.flops / SMALL.roof.flops,
        right_share=flop_utilization(step.flops, step.seconds, step.roof.flops),
        mfu=lambda reached, peak: flop_utilization(reached, 1.0, peak),
        mbu=lambda reached, peak: bandwidth_utilization(reached, 1.0, peak),
        # The 70B model.
        load=BIG.weight_bytes / g.disk,
        prefill_over_decode=read.rate / BIG.decode().rate,
        printed_intensity=round(read.flops, -12) / read.bytes,
        rounded_rate=round(BIG.decode().rate),
        equal_context=BIG.decode().flops / BIG.pair_flops,
        kv_share=BIG.kv * g.long_request / behind.bytes,
        rows_on_two=Served(shape=BIG.shape, precision=HALF, activations=0.0).most_rows(
            2 * H100.memory, length=g.long_request
        ),
        left_on_two=2 * H100.memory - BIG.weight_bytes,
        printed_left=H100.memory / 2,
        printed_rows=int(H100.memory / 2 / (g.long_request * BIG.kv)),
        sums_per_step=2 * BIG.layers,
        sums_seconds=2 * BIG.layers * reduced,
        price=lambda rows: price_per_million(g.gpu_price, BIG.decode(rows).rate),
        # Memory.
        llama_2=llama_2,
        mistral=mistral,
        mistral_cache=mistral_cache,
        mistral_wrong_cache=mistral_cache * shared_heads.heads / (shared_heads.vectors / 2),
        budget_weights=weight_bytes(ROUND_15B, HALF),
        budget=H100.memory - weight_bytes(ROUND_15B, HALF),
        paged_rows=SERVED_8B.most_paged_rows(g.usable * H100.memory, mean_length=g.paged_length),
        trained_length=LLAMA_8B.max_length,
        positions_like_weights=LLAMA.weight_bytes / LLAMA.kv,
        latent_kv=kv_bytes_per_position(DEEPSEEK_V3, HALF),
        latent_heads=latent.heads,
        latent_equivalent=len(DEEPSEEK_V3.layers) * every_head.kept * HALF.kv,
        gated=LLAMA_8B.layers[0].mlp.weights / 3 / LLAMA_8B.hidden**2,
        # Quantization.
        int4=BIG.stored(0.5),
        grouped=lambda zero_points: (
            Precision.of("float16", weights="int4", group=g.group, zero_points=zero_points).weights
        ),
        fp8_gain=BIG.decode(g.batches[2], g.long_request).seconds / fp8.seconds,
        # The chip.
        registers=chip.processors * chip.registers,
        on_chip=chip.processors * chip.shared,
        scores=heads.heads * g.long_prompt**2 * 2.0,
        launches=g.kernels_per_layer * LLAMA.layers,
        # Speculation.
        llama_decode=plain,
        llama_verify=verify,
        verify_extra=verify.seconds / plain.seconds - 1,
        break_even=break_even_batch(LLAMA_8B_H100, g.low_acceptance, drafted=g.fixed_draft, context=g.context),
        # Sampling.
        logit_bytes=logits,
        logit_share=logits / LLAMA.decode().bytes,
        tree_logits=step_work(LLAMA_8B, HALF, batch=g.tree_rows, context=0, drafted=g.tree_nodes).logit_bytes,
    )


def efficiency(shape: ModelShape, rows: int) -> float:
    """Return the seconds of a plain step over those of verifying a fixed draft, by the roof."""
    cost = RoofRounds(shape=shape, precision=HALF, roof=H100.roof("float16"))
    return target_efficiency(cost, batch=rows, drafted=GIVEN.fixed_draft, context=GIVEN.context)
