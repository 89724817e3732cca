"""Is it fast? Every comparison interleaved in one process: ``python -m experiments.bench speed only=[plain]``.

Each comparison alternates its two sides on the same prompts and prints the ratio of total times with the spread of the
per-repeat ratios. Ratios above 1 mean that the side named first is faster. Needs nothing but the bundled models and
random weights, neither hydra nor wandb; use all cores (or a GPU: ``device=cuda``) and an otherwise idle machine. The
bars are those of two CPU cores.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafters import MedusaDrafter, ModelDrafter, NGramDrafter
from experiments.bench import clock
from experiments.bench.clock import forward_seconds
from experiments.bench.options import option, read_options, refuse
from experiments.datasets.prompt import choose
from experiments.datasets.stdlib import Stdlib
from experiments.reporting import terminal
from experiments.reporting.table import Cell, Column, Emphasis, Table
from specdec import Engine, SamplingParams, Target
from specdec.execution.packing import packed_linears
from specdec.interfaces import Drafter
from specdec.target.loading import resolve_device
from verifiers import RejectionVerifier

DEVICE = torch.device("cpu")
"""Where everything runs; ``main`` sets it."""


@dataclass
class Result:
    """One comparison: ratios of single repeats, the ratio of total times, and the bar it has to reach."""

    name: str
    ratios: list[float]
    total: float
    bar: float | None = None
    lower_is_better: bool = False

    @property
    def reached(self) -> bool:
        """The ratio is as good as its bar, or there is none."""
        if self.bar is None:
            return True
        return self.total <= self.bar if self.lower_is_better else self.total >= self.bar

    @property
    def verdict(self) -> str:
        """The bar, and whether it was reached; nothing where there is none."""
        if self.bar is None:
            return ""
        return f"{'<=' if self.lower_is_better else '>='} {self.bar} {'reached' if self.reached else 'MISSED'}"


def llama_110m(vocab_size: int = 32000) -> LlamaForCausalLM:
    """Random weights in bf16: 12 layers of 768 channels, 110 million parameters in all (tied embeddings)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=8192, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device=DEVICE, dtype=torch.bfloat16).eval()  # pyright: ignore
    model.generation_config.eos_token_id = None
    return model


def bundled_target(**kwargs: object) -> Target:
    """The bundled target, which ends nowhere: every run makes the same number of tokens."""
    target = Target.from_pretrained("bundled/target", device=DEVICE, **kwargs)  # type: ignore[arg-type]
    target.eos_token_ids = frozenset()
    target.model.generation_config.eos_token_id = None
    return target


def small_model(shape: int | Sequence[int] = 4, **kwargs: object) -> ModelDrafter:
    """The bundled drafter."""
    return ModelDrafter.from_pretrained("bundled/drafter", shape=shape, device=DEVICE, **kwargs)  # type: ignore[arg-type]


def stdlib_prompts(target: Target, count: int, tokens: int = 128) -> list[list[int]]:
    """Held-out source code."""
    assert target.tokenizer is not None
    prompts, _ = choose(Stdlib(count=count, prompt_tokens=tokens, seed=0))
    return [target.tokenizer(prompt.turns[0])["input_ids"] for prompt in prompts]


def now() -> float:
    """The time when all that was asked for is done."""
    return clock.now(DEVICE)


def compare(
    name: str, ours: Callable[[int], object], theirs: Callable[[int], object], repeats: int, **kwargs: object
) -> Result:
    """Time two functions of the repeat's number in turn; the ratio is theirs over ours.

    Both go through all repeats once before, so that what is done once (choosing kernels, capturing forwards) is done.
    """
    for repeat in range(repeats):
        ours(repeat)
        theirs(repeat)
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        sides = [(0, ours), (1, theirs)]
        for which, side in sides if repeat % 2 else sides[::-1]:
            start = now()
            side(repeat)
            times[which].append(now() - start)
    ratios = [b / a for a, b in zip(*times, strict=True)]
    return Result(name, ratios, sum(times[1]) / sum(times[0]), **kwargs)  # type: ignore[arg-type]


def hf_generate(model: PreTrainedModel, prompt: list[int], new_tokens: int, **kwargs: object) -> torch.Tensor:
    """Greedy decoding by transformers itself."""
    ids = torch.tensor([prompt], device=DEVICE)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **kwargs
    )  # type: ignore[return-value,operator]


def plain_against_transformers(repeats: int) -> Iterator[Result]:
    """Plain greedy decoding, batch 1, the same model object."""
    for name, target, new_tokens, bar in (
        ("plain / transformers generate, random 110M, bf16", Target(llama_110m()), 64, 1.15),
        ("plain / transformers generate, bundled target", bundled_target(), 128, 1.05),
    ):
        engine = Engine(target, max_length=512)
        prompts = [[(7 * i + j) % 4000 for j in range(64)] for i in range(max(2, repeats))]
        sampling = SamplingParams(max_new_tokens=new_tokens)
        yield compare(
            name,
            lambda i, e=engine, s=sampling, p=prompts: e.generate([p[i]], s),
            lambda i, t=target, n=new_tokens, p=prompts: hf_generate(t.model, p[i], n),
            repeats,
            bar=bar,
        )


def drafters_against_transformers(repeats: int) -> Iterator[Result]:
    """Prompt lookup and a small model, greedy, the same lengths and models."""
    target = bundled_target()
    prompts = stdlib_prompts(target, max(2, repeats))
    sampling = SamplingParams(max_new_tokens=128)
    lookup = Engine(target, NGramDrafter(max_draft_tokens=8, branches=1), RejectionVerifier(), max_length=1024)
    yield compare(
        "prompt lookup (8) / transformers prompt_lookup_num_tokens=8",
        lambda i: lookup.generate([prompts[i]], sampling),
        lambda i: hf_generate(target.model, prompts[i], 128, prompt_lookup_num_tokens=8),
        repeats,
        bar=1.5,
    )
    drafter = small_model()
    assistant = small_model().model
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assistant.generation_config.eos_token_id = None
    model = Engine(target, drafter, RejectionVerifier(), max_length=1024)
    yield compare(
        "small model (4) / transformers assistant_model, 4 tokens",
        lambda i: model.generate([prompts[i]], sampling),
        lambda i: hf_generate(target.model, prompts[i], 128, assistant_model=assistant),
        repeats,
        bar=1.5,
    )


def overhead(repeats: int) -> Iterator[Result]:
    """A round's time over the time of its target and drafter forwards alone, 110M target, bundled-size drafter."""
    model = llama_110m(4096)
    target = Target(model)
    draft = small_model()
    sampling = SamplingParams(max_new_tokens=48)
    for name, drafter, temperature in (
        ("round / its forwards, 110M, small model, chain of 4, T=0", draft, 0.0),
        ("round / its forwards, 110M, small model, chain of 4, T=1", draft, 1.0),
        ("round / its forwards, 110M, n-gram", NGramDrafter(), 0.0),
    ):
        sampling = SamplingParams(max_new_tokens=48, temperature=temperature)
        prompt = [(3 * j) % 97 for j in range(64)]
        with Engine(target, drafter, RejectionVerifier(), max_length=512) as engine:
            engine.generate([prompt], sampling)
            ratios, whole, inside = [], 0.0, 0.0
            for _ in range(repeats):
                with forward_seconds(DEVICE, engine.runner, draft.runner) as spent:
                    list(engine.stream([prompt], SamplingParams(max_new_tokens=1)))  # the prefill, not counted
                    before = spent[0]
                    start = now()
                    engine.generate([prompt[:1]], sampling)  # one token of prompt: rounds only
                    seconds = now() - start
                ratios.append(seconds / (spent[0] - before))
                whole, inside = whole + seconds, inside + spent[0] - before
        yield Result(name, ratios, whole / inside, bar=1.10, lower_is_better=True)


def speculation(repeats: int) -> Iterator[Result]:
    """Speculation against plain decoding here: the bundled target as it is, and inflated to 110M; stdlib prompts."""
    for inflate, bars in ((None, (None, None)), ("110m", (1.8, 1.4))):
        target = bundled_target(inflate=inflate) if inflate else bundled_target()
        prompts = stdlib_prompts(target, max(2, repeats))
        for temperature, bar in zip((0.0, 1.0), bars, strict=True):
            sampling = SamplingParams(max_new_tokens=128, temperature=temperature)
            methods: dict[str, Drafter] = {
                "small model, chain of 4": small_model(),
                "small model, tree [2, 1, 1, 1, 1]": small_model((2, 1, 1, 1, 1), sampling="without_replacement"),
                "n-gram": NGramDrafter(max_draft_tokens=8, branches=1),
            }
            methods["Medusa"] = MedusaDrafter.from_pretrained("bundled/medusa")
            for name, drafter in methods.items():
                engine = Engine(target, drafter, RejectionVerifier(), max_length=1024)
                yield compare(
                    f"{name} / plain, {target.name}, T={temperature:g}",
                    lambda i, e=engine, s=sampling, p=prompts: e.generate([p[i]], s),
                    lambda i, e=engine, s=sampling, p=prompts: e.generate([p[i]], s, speculate=False),
                    repeats,
                    bar=bar if name.startswith("small model") else None,
                )


def batching(repeats: int) -> Iterator[Result]:
    """Tokens per second at batch 8 over batch 1, exactly four proposed nodes per row, 110M target."""
    target = Target(llama_110m(4096))
    drafter = small_model()
    sampling = SamplingParams(max_new_tokens=32)
    prompts = [[(5 * i + 3 * j) % 4000 for j in range(32)] for i in range(8)]
    one = Engine(target, drafter, RejectionVerifier(), max_length=256)
    eight = Engine(
        target,
        small_model(),
        RejectionVerifier(),
        max_length=256,
        max_batch_size=8,
    )
    yield compare(
        "batch 8 / batch 1, tokens/s, 4 nodes per row, 110M",
        lambda i: eight.generate(prompts, sampling),
        lambda i: [one.generate([prompt], sampling) for prompt in prompts],
        max(1, repeats // 2),
        bar=3.0,
    )


def packing(repeats: int) -> Iterator[Result]:
    """The 110M model's linear layers for one token and for nine, packed and plain (``execution/packing.py``)."""
    model = llama_110m()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    packed = packed_linears(model)

    @torch.inference_mode()
    def multiply(rows: int, *, pack: bool) -> None:
        inputs = {width: torch.ones(1, rows, width, device=DEVICE).bfloat16() for width in (768, 2048)}
        with packed.in_use() if pack else nullcontext():
            for _ in range(10):
                for layer in linears:
                    layer(inputs[layer.in_features])

    for rows in (1, 9):
        yield compare(
            f"linear layers of 110M, {rows} rows, packed / plain",
            lambda _, n=rows: multiply(n, pack=True),
            lambda _, n=rows: multiply(n, pack=False),
            repeats,
        )


COMPARISONS: dict[str, Callable[[int], Iterator[Result]]] = {
    "plain": plain_against_transformers,
    "drafters": drafters_against_transformers,
    "overhead": overhead,
    "speculation": speculation,
    "batching": batching,
    "packing": packing,
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option(tuple(COMPARISONS), "comparisons to make", choices=tuple(COMPARISONS))
    repeats: int = option(8, "how often each comparison is repeated", least=1)
    device: str = option("cpu", "cpu, cuda, or auto for a GPU if there is one")


def main() -> None:
    """Run the comparisons and print one table."""
    options = read_options(Options, __doc__)
    global DEVICE
    try:
        DEVICE = resolve_device(options.device)
        if DEVICE.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={options.device}: there is no GPU that this build of torch can use")
    except ValueError as error:
        refuse(error)
    console = terminal.console()
    where = f"{torch.get_num_threads()} threads" if DEVICE.type == "cpu" else torch.cuda.get_device_name(DEVICE)
    columns = [
        Column("comparison", "left", fold=True),
        Column("ratio of totals"),
        Column("per repeat: min, median, max"),
        Column("bar", "left"),
    ]
    table = Table(columns, f"torch {torch.__version__}, {where}")
    for name in options.only:
        for result in COMPARISONS[name](options.repeats):
            ratios = result.ratios
            spread = f"{min(ratios):.2f}, {statistics.median(ratios):.2f}, {max(ratios):.2f}"
            emphasis = Emphasis.NONE if result.reached else Emphasis.MISSED
            table.add(result.name, f"{result.total:.2f}", spread, Cell(result.verdict, emphasis=emphasis))
            # The table comes at the end, which may be many minutes away.
            line = f"{result.name}: {result.total:.2f} ({spread}) {result.verdict}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(terminal.render(table))


if __name__ == "__main__":
    main()
