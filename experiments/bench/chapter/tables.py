"""The chapter's tables, as Markdown (``{{ tables.devices() }}``), and how it writes numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace

from experiments.bench.chapter.figures import BIG, SERVED_8B, SMALL, efficiency
from experiments.bench.chapter.models import (
    A100,
    DEVICES,
    GIVEN,
    H100,
    HALF,
    LLAMA_8B,
    NAMED_8B,
    ONE_HEAD,
    ROUND_70B,
    SHAPES,
    Example,
)  # fmt: skip
from specdec.physics import heads
from specdec.physics.bounds import Roof
from specdec.physics.capacity import kv_bytes_per_position
from specdec.physics.devices import Device
from specdec.physics.precision import Precision
from specdec.physics.published import LLAMA_8B_H100
from specdec.physics.rounds import DraftModel, RoofRounds
from specdec.physics.shape import ModelShape, experts_hit
from specdec.physics.speculation import best_length, chain_tokens, speedup_of
from specdec.physics.work import prefill_work


def figure(value: float, digits: int = 3) -> str:
    """Return a number in so many significant digits, without zeros at its end; from there on, a whole number."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals <= 0:
        return f"{value:,.0f}"
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _unit(size: float, name: str, usual: int = 3) -> Callable[..., str]:
    return lambda value, digits=usual: f"{figure(value / size, digits)} {name}"


FILTERS: dict[str, Callable[..., str]] = {
    "n": figure,
    "exact": lambda value: f"{value:,.0f}",
    "dim": str,  # as it stands in a matrix's size: without commas
    "percent": lambda value, digits=2: f"{figure(100 * value, digits)} %",
    "times": lambda value, digits=3: f"{figure(value, digits)} times",
    "us": _unit(1e-6, "µs"), "ms": _unit(1e-3, "ms"), "s": _unit(1, "s"),
    "kb": _unit(1e3, "KB"), "mb": _unit(1e6, "MB"), "gb": _unit(1e9, "GB"), "tb": _unit(1e12, "TB"),
    "kib": _unit(2**10, "KiB"), "mib": _unit(2**20, "MiB"), "gib": _unit(2**30, "GiB"),
    "gbps": _unit(1e9, "GB/s"), "tbps": _unit(1e12, "TB/s", 4),
    "mflop": _unit(1e6, "MFLOP"), "gflop": _unit(1e9, "GFLOP"), "tflop": _unit(1e12, "TFLOP"),
    "tflops": _unit(1e12, "TFLOP/s", 4), "toks": _unit(1, "tokens/s"),
}  # fmt: skip
"""The units that a template writes behind a value: ``{{ step.seconds | ms }}``."""
exact, percent, ms, gb = FILTERS["exact"], FILTERS["percent"], FILTERS["ms"], FILTERS["gb"]


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> str:
    """Return a Markdown table whose first ``texts`` columns are texts, and the others numbers."""
    rule = ["---" if place < texts else "---:" for place in range(len(head))]
    lines = [head, rule, *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _kind(shape: ModelShape) -> str:
    """Return how the heads of a model share keys and values, in words."""
    attention = shape.layers[-1].attention
    assert attention is not None
    if attention.key_dim != attention.prefill_key_dim:
        return "MLA, latents"
    shared = attention.vectors // 2
    if shared == attention.heads:
        return f"MHA, {attention.heads} heads"
    return f"{'MQA' if shared == 1 else 'GQA'}, {shared} of {attention.heads}"


_TITLES = {
    "llama-2-7b": "Llama-2-7B", "llama-3.1-70b": "Llama-3.1-70B", "qwen3-8b": "Qwen3-8B",
    "llama-3.1-8b": "Llama-3.1-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B", "deepseek-v3": "DeepSeek-V3",
}  # fmt: skip
KV_MODELS = [
    *((title, _kind(SHAPES[name]), SHAPES[name]) for name, title in _TITLES.items()),
    ("the size of Llama-3.1-8B", _kind(ONE_HEAD), ONE_HEAD),
]
"""Models, how many heads have keys and values of their own, and their shapes."""


class Tables:
    """Every table, by the name that the template calls."""

    def __init__(self, figures: SimpleNamespace) -> None:
        self.f = figures

    def what_helps(self) -> str:
        """Tokens per second of the 8B model after one thing is doubled or halved."""
        roof = SMALL.roof
        faster = Example(SMALL.shape, Roof(bandwidth=roof.bandwidth, flops=2 * roof.flops))
        wider = Example(SMALL.shape, Roof(bandwidth=2 * roof.bandwidth, flops=roof.flops))
        found = {
            "as it is": SMALL.decode(),
            "a processor with twice the FLOP/s": faster.decode(),
            "a memory with twice the bandwidth": wider.decode(),
            "weights of half the bytes": SMALL.stored(1.0).decode(),
            "two requests in one step": SMALL.decode(2),
        }
        rows = [(name, ms(each.seconds), figure(each.rate)) for name, each in found.items()]
        return table(("one step of decoding", "least time", "tokens/s"), rows)

    def devices(self) -> str:
        """Bandwidth, rates and ridges of the table of devices, and of the machine that was measured."""
        rows = [_device(device, "float16") for device in DEVICES.values()]
        rows.append(_device(self.f.machine, "float32"))
        head = ("device", "memory", "TB/s", "TFLOP/s in 16 bits", "ridge", "in 8 bits", "ridge")
        return table(head, rows)

    def rates(self) -> str:
        """The H100's rates by number format."""
        rows = [(name, figure(rate / 1e12, 4), figure(rate / H100.bandwidth)) for name, rate in H100.flops.items()]
        return table(("products in", "TFLOP/s", "ridge"), rows)

    def big_model(self) -> str:
        """Prefill and decoding of the 70B model, weights alone."""
        found = {f"prefill {exact(GIVEN.long_prompt)} tokens": BIG.prefill(GIVEN.long_prompt)}
        found |= {f"decode, {_rows(rows)}": BIG.decode(rows) for rows in GIVEN.batches}
        rows = []
        for name, each in found.items():
            bound = "memory" if each.over_ridge < 1 else "compute"
            lasting = FILTERS["s"](each.seconds) if each.seconds >= 0.1 else ms(each.seconds)
            counted = figure(each.flops / 1e12), figure(each.bytes / 1e9), exact(each.intensity)
            rows.append((name, *counted, bound, lasting, exact(each.rate)))
        return table(("forward", "TFLOP", "GB", "FLOP/byte", "bound by", "least time", "tokens/s"), rows)

    def with_cache(self) -> str:
        """The 70B model's steps with and without the cache."""
        rows = []
        for batch in GIVEN.batches[:-1]:
            alone, behind = BIG.decode(batch), BIG.decode(batch, GIVEN.long_request)
            cache = batch * GIVEN.long_request * BIG.kv
            sizes = figure(alone.bytes / 1e9), figure(cache / 1e9), ms(alone.seconds), ms(behind.seconds)
            rows.append((batch, *sizes, exact(behind.rate), figure(behind.rate / batch)))
        head = ("rows", "weights, GB", "cache, GB", "weights alone", "with the cache", "tokens/s", "of one row")
        return table(head, rows)

    def kv_cache(self) -> str:
        """Bytes per position by architecture."""
        found = [(name, kind, kv_bytes_per_position(shape, HALF)) for name, kind, shape in KV_MODELS]
        heads = f"MHA, {self.f.latent_heads} heads"
        found.append(("DeepSeek-V3, if it had no latents", heads, self.f.latent_equivalent))
        rows = [(name, kind, exact(each), *(_size(n * each) for n in (4096, 131_072))) for name, kind, each in found]
        head = ("model", "attention", "bytes per token", f"{exact(4096)} tokens", f"{exact(131_072)} tokens")
        return table(head, rows, texts=2)

    def growth(self) -> str:
        """Operations and times of the 70B model by context."""
        products, rows = BIG.decode().flops, []
        for context in (1024, 4096, 16_384, 65_536, 131_072):
            attention = BIG.pair_flops * context
            share = BIG.prefill_attention(context) / BIG.prefill(context).flops
            counted = figure(products / 1e9), figure(attention / 1e9), percent(attention / products), percent(share)
            rows.append((exact(context), *counted, ms(BIG.decode(1, context).seconds)))
        head = ("GFLOP of weights", "of attention", "attention / weights", "over a whole prefill")
        return table(("context", *head, "least time of a step"), rows)

    def slots(self) -> str:
        """Rows of Llama-3.1-8B on 80 GB, by the length of a slot."""
        lengths, usable = (2048, 4096, 32_768, 131_072), GIVEN.usable * H100.memory
        rows = [(exact(length), SERVED_8B.most_rows(usable, length=length)) for length in lengths]
        return table(("length of a slot", "slots that fit"), rows, texts=0)

    def lengths(self) -> str:
        """The longest slots of Llama-3.1-8B on 80 GB, by rows."""
        limit, rows = LLAMA_8B.max_length or 0, []
        for count in (1, 4, 8, 32, 128):
            longest = SERVED_8B.longest(GIVEN.usable * H100.memory, rows=count)
            note = " (the model's own limit)" if longest > limit else ""
            rows.append((count, exact(min(longest, limit)) + note))
        return table(("rows", "longest slots that fit"), rows, texts=0)

    def formats(self) -> str:
        """The 70B model in every format: size and least time of a step."""
        kinds = {
            "float32": 4.0,
            "float16, bfloat16": 2.0,
            "int8, fp8": 1.0,
            "int4": 0.5,
            f"int4, a factor for {GIVEN.group}": self.f.grouped(False),
            f"int4, a factor and a zero point for {GIVEN.group}": self.f.grouped(True),
        }
        rows = []
        for name, size in kinds.items():
            step = BIG.stored(size).decode()
            timed = ms(step.seconds), figure(step.rate), figure(step.intensity)
            rows.append((name, figure(size, 5), figure(step.bytes / 1e9), *timed))
        return table(("weights in", "bytes each", "GB", "least time of a step", "tokens/s", "FLOP/byte"), rows)

    def chips(self) -> str:
        """The memories on the chips, from small and fast to large and slow."""
        rows = []
        for device in DEVICES.values():
            if (chip := device.chip) is not None:
                on_chip = [figure(chip.processors * size / 2**20) for size in (chip.registers, chip.shared)]
                memory = figure(device.cache / 1e6), gb(device.memory), figure(device.bandwidth / 1e12, 4)
                rows.append((device.title, chip.processors, *on_chip, *memory))
        head = ("device", "processors", "registers, MiB", "shared + L1, MiB", "L2, MB", "memory", "its TB/s")
        return table(head, rows)

    def tokens(self) -> str:
        """Tokens per round by acceptance and draft length."""
        drafts = (1, 3, 5, 8)
        rows = [(rate, *(f"{chain_tokens(rate, drafted):.2f}" for drafted in drafts)) for rate in GIVEN.acceptances]
        return table(("acceptance", *(f"{drafted} drafted" for drafted in drafts)), rows)

    def best_by_batch(self) -> str:
        """The best draft length and its speedup by batch, and that of a fixed one."""
        rows = [(rate, *(_best(rate, batch, GIVEN.context) for batch in GIVEN.loads)) for rate in GIVEN.acceptances]
        low, drafted, context = GIVEN.low_acceptance, GIVEN.fixed_draft, GIVEN.context
        fixed = [speedup_of(LLAMA_8B_H100, low, batch=batch, drafted=drafted, context=context) for batch in GIVEN.loads]
        rows.append((f"{low}, always {drafted}", *(f"{speed:.2f}" for speed in fixed)))
        return table(("acceptance", *map(_rows, GIVEN.loads)), rows)

    def best_by_context(self) -> str:
        """The best draft length and its speedup by context and batch."""
        rate, batches = GIVEN.acceptance, GIVEN.batches
        rows = [(exact(context), *(_best(rate, batch, context) for batch in batches)) for context in GIVEN.contexts]
        return table(("context", *map(_rows, batches)), rows)

    def experts(self) -> str:
        """Experts that a layer's step reads, by its tokens."""
        kinds = {"Mixtral-8x7B": "mixtral-8x7b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "DeepSeek-V3": "deepseek-v3"}
        counts, rows = (1, 4, 8, 32, 128), []
        for title, name in kinds.items():
            mlp = SHAPES[name].layers[-1].mlp
            read = [figure(experts_hit(tokens, experts=mlp.experts, chosen=mlp.chosen)) for tokens in counts]
            rows.append((f"{title}: {mlp.chosen} of {mlp.experts}", *read))
        return table(("experts read by", *("1 token" if n == 1 else f"{n} tokens" for n in counts)), rows)

    def efficiency(self) -> str:
        """Target efficiency of dense models and mixtures."""
        models = {"Llama-3.1-8B": "llama-3.1-8b", "Mixtral-8x7B": "mixtral-8x7b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
        rows = [
            (title, *(f"{efficiency(SHAPES[name], batch):.2f}" for batch in GIVEN.batches))
            for title, name in models.items()
        ]
        return table(("target efficiency", *map(_rows, GIVEN.batches)), rows)

    def critical(self) -> str:
        """The context from which a step is bound by memory at any number of rows."""
        fixed, rows = GIVEN.fixed_draft, []
        for shape in (NAMED_8B, ROUND_70B):
            example = Example(shape, H100.roof("float16"))
            found = [example.critical(drafted) for drafted in (0, 1, fixed, 7)]
            name = f"{figure(shape.weights / 1e9)} billion"
            rows.append((name, *("none" if each is None else exact(each) for each in found)))
        head = ("plain", "1 drafted", f"{fixed} drafted", "7 drafted")
        return table(("parameters, all of them multiplied", *head), rows)

    def attention_intensity(self) -> str:
        """Operations per byte of attention while decoding, by architecture."""
        rows = []
        for name, kind, shape in KV_MODELS:
            per_query = shape.pair_flops / kv_bytes_per_position(shape, HALF)
            rows.append((name, kind, figure(per_query), figure((GIVEN.fixed_draft + 1) * per_query)))
        return table(("model", "attention", "plain", f"verifying {GIVEN.fixed_draft}"), rows, texts=2)

    def request(self) -> str:
        """Least times of the short request of Llama-3.1-8B on an A100, with one thing changed at a time, and with two.

        Their parts are the prefill, drafting and the target's steps.
        """
        roof = A100.roof("float16")
        int4 = Precision.of("float16", weights="int4", group=GIVEN.group, output="float16")
        changed = [
            ("as it is", roof, HALF, False),
            ("twice the FLOP/s", replace(roof, flops=2 * roof.flops), HALF, False),
            ("twice the bandwidth", replace(roof, bandwidth=2 * roof.bandwidth), HALF, False),
            ("weights in int4", roof, int4, False),
            ("speculation", roof, HALF, True),
            ("int4 and speculation", roof, int4, True),
        ]
        rows, whole = [], 0.0
        at = {"batch": 1, "context": GIVEN.prompt + GIVEN.output / 2}  # what rows have halfway
        for name, own, precision, drafting in changed:
            head = DraftModel(shape=heads.eagle3(LLAMA_8B), precision=HALF)
            cost = RoofRounds(shape=LLAMA_8B, precision=precision, roof=own, drafter=head)
            prefill = prefill_work(LLAMA_8B, precision, tokens=GIVEN.prompt).by_parts(own)
            drafted = best_length(cost, GIVEN.acceptance, longest=GIVEN.longest, **at).drafted if drafting else 0
            rounds = GIVEN.output / chain_tokens(GIVEN.acceptance, drafted)
            parts = [prefill, rounds * cost.draft(drafted=drafted, **at), rounds * cost.verify(drafted=drafted, **at)]
            whole = whole or sum(parts)
            about = f"{name}, {drafted} drafted" if drafting else name
            rows.append((about, *(figure(1e3 * part) for part in (*parts, sum(parts))), f"{whole / sum(parts):.2f}"))
        return table(("changed", "prefill", "drafting", "target's steps", "in all", "times as fast"), rows)

    def prices(self) -> str:
        """The price of a million tokens of the 70B model."""
        rows = [(_rows(n), exact(BIG.decode(n).rate), f"{self.f.price(n):.2f}") for n in GIVEN.batches]
        return table(("batch", "tokens/s", "price of a million tokens"), rows)


def _device(device: Device, dtype: str) -> tuple[str, ...]:
    roof, note = device.roof(dtype), "" if dtype == "float16" else f" ({dtype})"
    eight = device.flops.get("fp8") or device.flops.get("int8")
    sixteen = gb(device.memory), figure(device.bandwidth / 1e12, 4), figure(roof.flops / 1e12, 4) + note
    return (
        device.title + (" (measured)" if note else ""),
        *sixteen,
        figure(roof.ridge),
        *((figure(eight / 1e12, 4), figure(eight / device.bandwidth)) if eight else ("none", "none")),
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _size(size: float) -> str:
    return gb(size) if size >= 1e9 else FILTERS["mb"](size)


def _best(rate: float, batch: int, context: int) -> str:
    found = best_length(LLAMA_8B_H100, rate, batch=batch, context=context, longest=GIVEN.longest)
    return f"{found.drafted}: {found.speedup:.2f}" if found.drafted else "plain"
