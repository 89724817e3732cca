"""The figures that the chapter's sentences name: each is a call of ``specdec.physics``."""

from functools import cached_property

from experiments.bench.chapter.examples import Example, Forward
from experiments.bench.chapter.given import GIVEN, LONGEST, VLLM_8B
from experiments.bench.chapter.models import (
    DEEPSEEK_V3,
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
    this_machine,
)
from specdec.physics.bounds import Roof, Work, bandwidth_utilization, flop_utilization
from specdec.physics.capacity import Served, kv_bytes_per_position, weight_bytes
from specdec.physics.devices import Device
from specdec.physics.precision import Precision
from specdec.physics.rounds import RoofRounds
from specdec.physics.serving import all_reduce_seconds, latency, load_seconds, price_per_million
from specdec.physics.shape import Attention, ModelShape
from specdec.physics.speculation import (
    break_even_batch,
    chain_tokens,
    target_efficiency,
)
from specdec.physics.work import step_work


def shared(device: Device) -> float:
    """Bytes of shared memory and first caches on a chip."""
    assert device.chip is not None
    return device.chip.processors * device.chip.shared


def registers(device: Device) -> float:
    """Bytes of registers on a chip."""
    assert device.chip is not None
    return device.chip.processors * device.chip.registers


class Figures:
    """Everything that the template names."""

    g = GIVEN
    small = Example(ROUND_8B, ROUND_A100)
    """8 billion parameters on an A100, both in round numbers."""
    big = Example(ROUND_70B, H100.roof("float16"))
    """70 billion parameters on an H100."""
    llama = Example(LLAMA_8B, H100.roof("float16"))
    """Llama-3.1-8B as its configuration says, on an H100."""
    h100 = H100
    fp8 = H100.roof("fp8")

    @cached_property
    def machine(self) -> Device:
        """The machine whose roof was measured."""
        return this_machine()

    @property
    def machine_roof(self) -> Roof:
        """What it does at best."""
        return self.machine.roof("float32")

    @property
    def machine_rows(self) -> float:
        """Rows at which decoding in float32 is at its ridge, weights alone."""
        return self.machine_roof.ridge * Precision.of("float32").weights / 2

    # ---------------------------------------------------------------- a short request

    @property
    def request_prefill(self) -> float:
        """Seconds of the short request's prompt."""
        return self.small.prefill(self.g.prompt).seconds

    @property
    def request_decode(self) -> float:
        """Seconds of its output."""
        return self.g.output * self.small.decode().seconds

    @property
    def request_seconds(self) -> float:
        """Both: the time to the first token is the prefill and a step, the others are steps."""
        step = self.small.decode().seconds
        return latency(self.request_prefill + step, step, self.g.output)

    @property
    def wrong_share(self) -> float:
        """Operations per *token* over operations per second, which some texts call utilization."""
        return self.small.decode().flops / self.small.roof.flops

    @property
    def right_share(self) -> float:
        """Operations per second over operations per second."""
        step = self.small.decode()
        return flop_utilization(step.flops, step.seconds, step.roof.flops)

    def one_matrix(self, tokens: int) -> Forward:
        """A product with one square matrix of Llama-3.1-8B's width."""
        width = LLAMA_8B.hidden
        work = Work(bytes=2.0 * width * width, flops=2.0 * tokens * width * width)
        return Forward(work, self.small.roof, tokens)

    hidden = LLAMA_8B.hidden

    # ---------------------------------------------------------------- 70B

    @property
    def load(self) -> float:
        """Seconds of reading the 70B model from a disk."""
        return load_seconds(self.big.weight_bytes, self.g.disk)

    @property
    def prefill_over_decode(self) -> float:
        """Tokens per second of a prefill over those of decoding one row."""
        return self.big.prefill(self.g.long_prompt).rate / self.big.decode().rate

    @property
    def printed_intensity(self) -> float:
        """Operations per byte of its prefill as some texts print them, from rounded figures."""
        step = self.big.prefill(self.g.long_prompt)
        return round(step.flops, -12) / step.bytes

    @property
    def rounded_rate(self) -> int:
        """Tokens per second of one row of the 70B model, rounded."""
        return round(self.big.decode().rate)

    @property
    def equal_context(self) -> float:
        """The context where its attention costs as many operations as its products with weights."""
        return self.big.equal_context

    @property
    def kv_share(self) -> float:
        """The cache's share of the bytes of a step behind the long request."""
        behind = self.big.decode(1, self.g.long_request)
        return self.big.kv * self.g.long_request / behind.bytes

    @property
    def rows_on_two(self) -> int:
        """How many long requests fit on two H100 beside the 70B model."""
        served = Served(shape=self.big.shape, precision=HALF, activations=0.0)
        return served.most_rows(2 * H100.memory, length=self.g.long_request)

    @property
    def left_on_two(self) -> float:
        """Memory beside the 70B model on two H100."""
        return 2 * H100.memory - self.big.weight_bytes

    @property
    def printed_left(self) -> float:
        """What some texts leave beside it on one H100."""
        return H100.memory / 2

    @property
    def printed_rows(self) -> int:
        """How many requests that would be."""
        return int(self.printed_left / (self.g.long_request * self.big.kv))

    def mfu(self, reached: float, peak: float) -> float:
        """A share of a peak."""
        return flop_utilization(reached, 1.0, peak)

    def mbu(self, reached: float, peak: float) -> float:
        """A share of a peak."""
        return bandwidth_utilization(reached, 1.0, peak)

    @property
    def sums_per_step(self) -> int:
        """Sums over devices in a step of the 70B model."""
        return 2 * len(self.big.shape.layers)

    @property
    def sums_seconds(self) -> float:
        """Seconds of them on two H100 for one token, without latency."""
        assert H100.chip is not None and H100.chip.link is not None
        each = all_reduce_seconds(
            devices=2, tokens=1, hidden=LLAMA_70B.hidden, number_bytes=2, bandwidth=H100.chip.link / 2
        )
        return self.sums_per_step * each

    # ---------------------------------------------------------------- memory

    llama_2 = Example(ROUND_7B, ROUND_A100)
    mistral = Example(MISTRAL_7B, ROUND_A100)

    @property
    def llama_2_length(self) -> int:
        """The length that memory examples give it."""
        return 2048

    @property
    def mistral_rows(self) -> int:
        """Rows of the memory example."""
        return 4

    @property
    def mistral_cache(self) -> float:
        """Bytes of its cache."""
        return self.mistral_rows * self.g.long_prompt * self.mistral.kv

    @property
    def mistral_wrong_cache(self) -> float:
        """The same with keys and values for all query heads."""
        attention = self.mistral.shape.layers[0].attention
        assert attention is not None
        return self.mistral_cache * attention.heads / (attention.vectors / 2)

    def in_all(self, example: Example, cache: float) -> tuple[float, float]:
        """Weights, cache and activations, from and to."""
        low, high = self.g.activations
        return example.weight_bytes + cache + low, example.weight_bytes + cache + high

    @property
    def budget_weights(self) -> float:
        """Weights of a model of 15 billion parameters."""
        return weight_bytes(ROUND_15B, HALF)

    @property
    def budget(self) -> float:
        """What is left beside it."""
        return H100.memory - self.budget_weights

    @property
    def served_8b(self) -> Served:
        """Llama-3.1-8B with 2 GB of everything else."""
        return Served(shape=LLAMA_8B, precision=HALF, activations=0.0, overhead=self.served_overhead)

    served_overhead = 2e9
    usable = 0.9

    @property
    def paged_rows(self) -> int:
        """Rows in pages, if they are a quarter as long as the slots on average."""
        return self.served_8b.most_paged_rows(self.usable * H100.memory, mean_length=self.paged_length)

    paged_length = 1024
    trained_length = LLAMA_8B.max_length

    @property
    def positions_like_weights(self) -> float:
        """Positions whose cache is as large as Llama-3.1-8B's weights."""
        return self.llama.weight_bytes / self.llama.kv

    @property
    def latent_kv(self) -> float:
        """Bytes per position of DeepSeek-V3's latents."""
        return kv_bytes_per_position(DEEPSEEK_V3, HALF)

    @property
    def latent_heads(self) -> int:
        """Its heads."""
        attention = DEEPSEEK_V3.layers[0].attention
        assert attention is not None
        return attention.heads

    @property
    def latent_equivalent(self) -> float:
        """The same with keys and values for every head."""
        attention = DEEPSEEK_V3.layers[0].attention
        assert attention is not None
        every = Attention.grouped(
            weights=0, heads=self.latent_heads, kv_heads=self.latent_heads, head_dim=attention.prefill_value_dim
        )
        return len(DEEPSEEK_V3.layers) * every.kept * HALF.kv

    @property
    def gated(self) -> float:
        """The inner width of Llama-3.1-8B's feed-forward part over its hidden width."""
        return LLAMA_8B.layers[0].mlp.weights / 3 / LLAMA_8B.hidden**2

    # ---------------------------------------------------------------- quantization

    int4 = Example(ROUND_70B, H100.roof("float16"), Precision(weights=0.5, output=0.5))

    @property
    def group(self) -> int:
        """Weights that share a factor."""
        return 64

    def grouped(self, *, zero_points: bool) -> float:
        """Bytes of a weight in 4 bits with its share of a factor, and perhaps a zero point."""
        return Precision.of("float16", weights="int4", group=self.group, zero_points=zero_points).weights

    @property
    def fp8_gain(self) -> float:
        """What weights in one byte bring to a batch of 32 behind the long request, cache in two bytes."""
        rows = self.g.batches[2]
        half = self.big.decode(rows, self.g.long_request).seconds
        return half / self.big.stored(weights=1.0).decode(rows, self.g.long_request).seconds

    # ---------------------------------------------------------------- the chip

    @property
    def registers(self) -> float:
        """Bytes of registers on an H100."""
        return registers(H100)

    @property
    def on_chip(self) -> float:
        """Bytes of shared memory and first caches on an H100."""
        return shared(H100)

    @property
    def scores(self) -> float:
        """Bytes of one layer's attention scores over the long prompt, if they were written."""
        attention = self.big.shape.layers[0].attention
        assert attention is not None
        return attention.heads * self.g.long_prompt**2 * 2.0

    @property
    def launches(self) -> int:
        """Kernels that a step of Llama-3.1-8B launches, about."""
        return self.g.kernels_per_layer * len(LLAMA_8B.layers)

    # ---------------------------------------------------------------- speculation

    longest = LONGEST

    @property
    def tokens(self) -> float:
        """Tokens per round with a fixed draft."""
        return chain_tokens(self.g.acceptance, self.g.fixed_draft)

    @property
    def llama_decode(self) -> Forward:
        """A plain step of Llama-3.1-8B on an H100, with a context."""
        return self.llama.decode(1, self.g.context)

    @property
    def llama_verify(self) -> Forward:
        """One that verifies a fixed draft."""
        return self.llama.decode(1, self.g.context, self.g.fixed_draft)

    @property
    def verify_extra(self) -> float:
        """What verifying takes longer than a plain step, as a share."""
        return self.llama_verify.seconds / self.llama_decode.seconds - 1

    @property
    def break_even(self) -> int | None:
        """The largest batch at which a fixed draft of low acceptance pays, with the fitted constants."""
        return break_even_batch(VLLM_8B, self.g.low_acceptance, drafted=self.g.fixed_draft, context=self.g.context)

    def efficiency(self, shape: ModelShape, rows: int) -> float:
        """The seconds of a plain step over those of verifying a fixed draft, by the roof."""
        cost = RoofRounds(shape=shape, precision=HALF, roof=H100.roof("float16"))
        return target_efficiency(cost, batch=rows, drafted=self.g.fixed_draft, context=self.g.context)

    @property
    def most_kv_tokens(self) -> int:
        """Positions that fit on an H100 beside Llama-3.1-8B, in all."""
        return int((self.usable * H100.memory - self.llama.weight_bytes - self.served_overhead) / self.llama.kv)

    # ---------------------------------------------------------------- sampling, prices

    vocab = LLAMA_8B.vocab

    @property
    def logit_bytes(self) -> float:
        """Bytes of the logits of one token of Llama-3.1-8B."""
        return step_work(LLAMA_8B, HALF, batch=1, context=0).logit_bytes

    @property
    def logit_share(self) -> float:
        """Their share of the bytes of a step."""
        return self.logit_bytes / self.llama.decode().bytes

    @property
    def tree_rows(self) -> int:
        """Rows of an example with many nodes."""
        return 64

    @property
    def tree_nodes(self) -> int:
        """Drafted nodes of each of them."""
        return 8

    @property
    def tree_logits(self) -> float:
        """Bytes of the logits of many rows with a draft each."""
        return step_work(LLAMA_8B, HALF, batch=self.tree_rows, context=0, drafted=self.tree_nodes).logit_bytes

    def price(self, rows: int) -> float:
        """The price of a million tokens of the 70B model, weights alone."""
        return price_per_million(self.g.gpu_price, self.big.decode(rows).rate)
