"""The chapter's tables, as Markdown."""

from experiments.bench.chapter.examples import Example, Forward
from experiments.bench.chapter.figures import Figures, registers, shared
from experiments.bench.chapter.formats import FILTERS, exact, figure, fixed, percent, table
from experiments.bench.chapter.given import ACCEPTANCES, BATCHES, CONTEXTS, GIVEN, LONGEST, VLLM_8B
from experiments.bench.chapter.models import (
    DEEPSEEK_V3,
    DEVICES,
    H100,
    HALF,
    LLAMA_2_7B,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    NAMED_8B,
    ONE_HEAD,
    QWEN3_8B,
    QWEN3_30B,
    ROUND_70B,
)
from specdec.physics.bounds import Roof
from specdec.physics.capacity import kv_bytes_per_position
from specdec.physics.devices import Device
from specdec.physics.shape import ModelShape, experts_hit
from specdec.physics.speculation import best_length, chain_tokens, speedup_of

ms, gb, tflop, kb = FILTERS["ms"], FILTERS["gb"], FILTERS["tflop"], FILTERS["kb"]

DRAFTS = (1, 3, 5, 8)


def _kind(shape: ModelShape) -> str:
    """Returns how the heads of a model share keys and values, in words."""
    attention = shape.layers[-1].attention
    assert attention is not None
    if attention.key_dim != attention.prefill_key_dim:
        return "MLA, latents"
    shared = attention.vectors // 2
    if shared == attention.heads:
        return f"MHA, {attention.heads} heads"
    return f"{'MQA' if shared == 1 else 'GQA'}, {shared} of {attention.heads}"


KV_MODELS: tuple[tuple[str, str, ModelShape], ...] = tuple(
    (name, _kind(shape), shape)
    for name, shape in (
        ("Llama-2-7B", LLAMA_2_7B),
        ("Llama-3.1-70B", LLAMA_70B),
        ("Qwen3-8B", QWEN3_8B),
        ("Llama-3.1-8B", LLAMA_8B),
        ("Qwen3-30B-A3B", QWEN3_30B),
        ("DeepSeek-V3", DEEPSEEK_V3),
        ("the size of Llama-3.1-8B", ONE_HEAD),
    )
)
"""Models, and how many heads have keys and values of their own."""


class Tables:
    """Every table, by the name that the template calls."""

    def __init__(self, figures: Figures) -> None:
        self.f = figures

    def what_helps(self) -> str:
        """Tokens per second of the 8B model after one thing is doubled or halved."""
        small = self.f.small
        roof = small.roof
        faster = Example(small.shape, Roof(bandwidth=roof.bandwidth, flops=2 * roof.flops))
        wider = Example(small.shape, Roof(bandwidth=2 * roof.bandwidth, flops=roof.flops))
        found: list[tuple[str, Forward]] = [
            ("as it is", small.decode()),
            ("a processor with twice the FLOP/s", faster.decode()),
            ("a memory with twice the bandwidth", wider.decode()),
            ("weights of half the bytes", small.stored(weights=1.0).decode()),
            ("two requests in one step", small.decode(2)),
        ]
        rows = [(name, ms(each.seconds), figure(each.rate)) for name, each in found]
        return table(("one step of decoding", "least time", "tokens/s"), rows)

    def devices(self) -> str:
        """Bandwidth, rates and ridges of the table of devices, and of the machine that was measured."""
        rows = [self._device(device, "float16") for device in DEVICES.values()]
        rows.append(self._device(self.f.machine, "float32"))
        head = ("device", "memory", "TB/s", "TFLOP/s in 16 bits", "ridge", "in 8 bits", "ridge")
        return table(head, rows)

    @staticmethod
    def _device(device: Device, dtype: str) -> tuple[str, ...]:
        roof = device.roof(dtype)
        eight = device.flops.get("fp8") or device.flops.get("int8")
        note = "" if dtype == "float16" else f" ({dtype})"
        return (
            device.title if dtype == "float16" else f"{device.title} (measured)",
            gb(device.memory),
            figure(device.bandwidth / 1e12, 4),
            figure(roof.flops / 1e12, 4) + note,
            figure(roof.ridge),
            figure(eight / 1e12, 4) if eight else "none",
            figure(eight / device.bandwidth) if eight else "none",
        )

    def rates(self) -> str:
        """The H100's rates by number format."""
        rows = [(name, figure(rate / 1e12, 4), figure(rate / H100.bandwidth)) for name, rate in H100.flops.items()]
        return table(("products in", "TFLOP/s", "ridge"), rows)

    def big_model(self) -> str:
        """Prefill and decoding of the 70B model, weights alone."""
        big = self.f.big
        found = [(f"prefill {exact(GIVEN.long_prompt)} tokens", big.prefill(GIVEN.long_prompt))]
        found += [(f"decode, {_rows(rows)}", big.decode(rows)) for rows in GIVEN.batches]
        return table(
            ("forward", "TFLOP", "GB", "FLOP/byte", "bound by", "least time", "tokens/s"),
            (
                (
                    name,
                    figure(each.flops / 1e12),
                    figure(each.bytes / 1e9),
                    exact(each.intensity),
                    each.bound,
                    _lasting(each.seconds),
                    exact(each.rate),
                )
                for name, each in found
            ),
        )

    def with_cache(self) -> str:
        """What the cache adds to the steps of the 70B model."""
        rows = []
        for batch in GIVEN.batches[:-1]:
            alone, behind = self.f.big.decode(batch), self.f.big.decode(batch, GIVEN.long_request)
            cache = batch * GIVEN.long_request * self.f.big.kv
            rows.append(
                (
                    str(batch),
                    figure(alone.bytes / 1e9),
                    figure(cache / 1e9),
                    ms(alone.seconds),
                    ms(behind.seconds),
                    exact(behind.rate),
                    figure(behind.rate / batch),
                )
            )
        head = ("rows", "weights, GB", "cache, GB", "weights alone", "with the cache", "tokens/s", "of one row")
        return table(head, rows)

    def kv_cache(self) -> str:
        """Bytes per position by architecture."""
        rows = []
        for name, kind, shape in KV_MODELS:
            each = kv_bytes_per_position(shape, HALF)
            rows.append((name, kind, exact(each), _size(4096 * each), _size(131_072 * each)))
        equivalent = self.f.latent_equivalent
        rows.append(
            (
                "DeepSeek-V3, if it had no latents",
                f"MHA, {self.f.latent_heads} heads",
                exact(equivalent),
                _size(4096 * equivalent),
                _size(131_072 * equivalent),
            )
        )
        head = ("model", "attention", "bytes per token", f"{exact(4096)} tokens", f"{exact(131_072)} tokens")
        return table(head, rows, texts=2)

    def growth(self) -> str:
        """Operations and times of the 70B model by context."""
        big, rows = self.f.big, []
        products = big.decode().flops
        for context in (1024, 4096, 16_384, 65_536, 131_072):
            attention = big.pair_flops * context
            prefill = big.prefill(context).flops
            rows.append(
                (
                    exact(context),
                    figure(products / 1e9),
                    figure(attention / 1e9),
                    percent(attention / products),
                    percent(big.prefill_attention(context) / prefill),
                    ms(big.decode(1, context).seconds),
                )
            )
        head = (
            "context",
            "GFLOP of weights",
            "of attention",
            "attention / weights",
            "over a whole prefill",
            "least time of a step",
        )
        return table(head, rows)

    def slots(self) -> str:
        """Rows of Llama-3.1-8B on 80 GB, by the length of a slot."""
        usable = self.f.usable * H100.memory
        rows = [
            (exact(length), str(self.f.served_8b.most_rows(usable, length=length)))
            for length in (2048, 4096, 32_768, 131_072)
        ]
        return table(("length of a slot", "slots that fit"), rows, texts=0)

    def lengths(self) -> str:
        """The longest slots of Llama-3.1-8B on 80 GB, by rows."""
        usable = self.f.usable * H100.memory
        limit = LLAMA_8B.max_length or 0
        rows = []
        for count in (1, 4, 8, 32, 128):
            longest = self.f.served_8b.longest(usable, rows=count)
            rows.append(
                (str(count), exact(min(longest, limit)) + (" (the model's own limit)" if longest > limit else ""))
            )
        return table(("rows", "longest slots that fit"), rows, texts=0)

    def formats(self) -> str:
        """The 70B model in every format: size and least time of a step."""
        kinds: list[tuple[str, float]] = [
            ("float32", 4.0),
            ("float16, bfloat16", 2.0),
            ("int8, fp8", 1.0),
            ("int4", 0.5),
            (f"int4, a factor for {self.f.group}", self.f.grouped(zero_points=False)),
            (f"int4, a factor and a zero point for {self.f.group}", self.f.grouped(zero_points=True)),
        ]
        rows = []
        for name, size in kinds:
            step = self.f.big.stored(weights=size).decode()
            rows.append(
                (
                    name,
                    figure(size, 5),
                    figure(step.bytes / 1e9),
                    ms(step.seconds),
                    figure(step.rate),
                    figure(step.intensity),
                )
            )
        return table(("weights in", "bytes each", "GB", "least time of a step", "tokens/s", "FLOP/byte"), rows)

    def chips(self) -> str:
        """What is on the chips, from small and fast to large and slow."""
        rows = []
        for device in DEVICES.values():
            if device.chip is None:
                continue
            rows.append(
                (
                    device.title,
                    str(device.chip.processors),
                    figure(registers(device) / 2**20),
                    figure(shared(device) / 2**20),
                    figure(device.cache / 1e6),
                    gb(device.memory),
                    figure(device.bandwidth / 1e12, 4),
                )
            )
        head = ("device", "processors", "registers, MiB", "shared + L1, MiB", "L2, MB", "memory", "its TB/s")
        return table(head, rows)

    def tokens(self) -> str:
        """Tokens per round by acceptance and draft length."""
        rows = [(str(rate), *(fixed(chain_tokens(rate, drafted)) for drafted in DRAFTS)) for rate in ACCEPTANCES]
        return table(("acceptance", *(f"{drafted} drafted" for drafted in DRAFTS)), rows)

    def best_by_batch(self) -> str:
        """The best draft length and its speedup by batch, and that of a fixed one."""
        rows = [(str(rate), *(_best(rate, batch, GIVEN.context) for batch in BATCHES)) for rate in ACCEPTANCES]
        low, drafted = GIVEN.low_acceptance, GIVEN.fixed_draft
        rows.append(
            (
                f"{low}, always {drafted}",
                *(
                    fixed(speedup_of(VLLM_8B, low, batch=batch, drafted=drafted, context=GIVEN.context))
                    for batch in BATCHES
                ),
            )
        )
        return table(("acceptance", *(_rows(batch) for batch in BATCHES)), rows)

    def best_by_context(self) -> str:
        """The best draft length and its speedup by context and batch."""
        batches = (1, 8, 32, 128, 512)
        rows = [
            (exact(context), *(_best(GIVEN.acceptance, batch, context) for batch in batches)) for context in CONTEXTS
        ]
        return table(("context", *(_rows(batch) for batch in batches)), rows)

    def experts(self) -> str:
        """Experts that a layer's step reads, by its tokens."""
        kinds = (("Mixtral-8x7B", MIXTRAL), ("Qwen3-30B-A3B", QWEN3_30B), ("DeepSeek-V3", DEEPSEEK_V3))
        counts = (1, 4, 8, 32, 128)
        rows = []
        for name, shape in kinds:
            mlp = shape.layers[-1].mlp
            read = [experts_hit(tokens, experts=mlp.experts, chosen=mlp.chosen) for tokens in counts]
            rows.append((f"{name}: {mlp.chosen} of {mlp.experts}", *map(figure, read)))
        return table(("experts read by", *("1 token" if n == 1 else f"{n} tokens" for n in counts)), rows)

    def efficiency(self) -> str:
        """Target efficiency of dense models and mixtures."""
        batches = (1, 8, 32, 128, 512)
        models = (("Llama-3.1-8B", LLAMA_8B), ("Mixtral-8x7B", MIXTRAL), ("Qwen3-30B-A3B", QWEN3_30B))
        rows = [(name, *(fixed(self.f.efficiency(shape, batch)) for batch in batches)) for name, shape in models]
        return table(("target efficiency", *(_rows(batch) for batch in batches)), rows)

    def critical(self) -> str:
        """The context from which a step is bound by memory at any number of rows."""
        roof = H100.roof("float16")
        rows = []
        for shape in (NAMED_8B, ROUND_70B):
            name, example = f"{figure(shape.weights / 1e9)} billion", Example(shape, roof)
            found = [example.critical(drafted) for drafted in (0, 1, GIVEN.fixed_draft, 7)]
            rows.append((name, *(exact(each) if each is not None else "none" for each in found)))
        return table(
            ("parameters, all of them multiplied", "plain", "1 drafted", f"{GIVEN.fixed_draft} drafted", "7 drafted"),
            rows,
        )

    def attention_intensity(self) -> str:
        """Operations per byte of attention while decoding, by architecture."""
        rows = []
        for name, kind, shape in KV_MODELS:
            per_query = Example(shape, H100.roof("float16")).attention_intensity
            rows.append((name, kind, figure(per_query), figure((GIVEN.fixed_draft + 1) * per_query)))
        head = ("model", "attention", "plain", f"verifying {GIVEN.fixed_draft}")
        return table(head, rows, texts=2)

    def prices(self) -> str:
        """The price of a million tokens of the 70B model."""
        rows = [
            (_rows(batch), exact(self.f.big.decode(batch).rate), fixed(self.f.price(batch))) for batch in GIVEN.batches
        ]
        return table(("batch", "tokens/s", "price of a million tokens"), rows)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _lasting(seconds: float) -> str:
    return FILTERS["s"](seconds) if seconds >= 0.1 else ms(seconds)


def _size(size: float) -> str:
    return gb(size) if size >= 1e9 else FILTERS["mb"](size)


def _best(rate: float, batch: int, context: int) -> str:
    found = best_length(VLLM_8B, rate, batch=batch, context=context, longest=LONGEST)
    return f"{found.drafted}: {fixed(found.speedup)}" if found.drafted else "plain"
