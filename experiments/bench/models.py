"""The models that are measured, and prompts: real shapes with random weights, and the bundled ones."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import ModelDrafter
from experiments.datasets.prompt import choose
from experiments.datasets.stdlib import Stdlib
from specdec.forward import ForwardBatch
from specdec.machine import choose_dtype
from specdec.quantization import check_quantization, quantize
from specdec.quantization.checkpoint import mark
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.topology import Topology

BUNDLED = "bundled"

_LARGE = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    },
    "110m": {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        **_LARGE, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LARGE, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-70b": {
        **_LARGE, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
"""Llama shapes by name: a toy, the 110M shape of the other benchmarks, Llama-3.2-1B, Llama-3.1-8B and -70B."""
ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; ``"auto"`` is bfloat16 where the device computes in it."""
    return choose_dtype(torch.bfloat16, device).dtype if name == "auto" else getattr(torch, name)


def make_target(
    name: str, device: torch.device, dtype: torch.dtype, *, quantization: str | None = None, seed: int = 0, **sizes: Any
) -> Target:
    """Return a model that ends nowhere: every request makes as many tokens as it asks for.

    Args:
        name: A key of ``SHAPES``, or ``BUNDLED``.
        quantization: Weights in fewer bits. They are quantized layer by layer, so that a model fits whose unquantized
            weights would not.
        **sizes: Fields of a named shape's configuration that are to be others.
    """
    if name == BUNDLED:
        return bundled_target(device=device, dtype=dtype, quantization=quantization)
    config = LlamaConfig(**{**SHAPES[name], **ENDLESS, **sizes})
    shown = name if quantization is None else f"{name} in {quantization}"
    return Target(_random_llama(config, device, dtype, quantization, seed), name=f"random {shown}")


def llama_110m(vocab_size: int = 32000, *, device: torch.device | str = "cpu", **changes: Any) -> LlamaForCausalLM:
    """Return random weights in bf16: 12 layers of 768 channels, 110 million parameters in all (tied embeddings)."""
    torch.manual_seed(0)
    sizes = {**SHAPES["110m"], "vocab_size": vocab_size, **changes}
    config = LlamaConfig(**sizes, **ENDLESS)
    model = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()  # pyright: ignore
    model.generation_config.eos_token_id = None
    return model


def bundled_target(**options: Any) -> Target:
    """Return the bundled target, which ends nowhere: every run makes the same number of tokens."""
    target = Target.from_pretrained("bundled/target", **options)
    target.eos_token_ids = frozenset()
    target.model.generation_config.eos_token_id = None
    return target


def small_model(target: Target, shape: int | Sequence[int] = 4, **options: Any) -> ModelDrafter:
    """Return the bundled drafter, on the device of a target."""
    return ModelDrafter.from_pretrained("bundled/drafter", shape=shape, device=target.device, **options)


def assistant_of(drafter: ModelDrafter, tokens: int) -> Any:
    """Return a drafter's model as transformers' assistant that always drafts so many tokens."""
    config: Any = drafter.model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = tokens, "constant"
    config.assistant_confidence_threshold, config.eos_token_id = 0.0, None
    return drafter.model


def hf_generate(model: Any, prompt: list[int], new_tokens: int, **options: Any) -> list[int]:
    """Return what transformers' greedy ``generate`` emits after a prompt."""
    ids = torch.tensor([prompt], device=model.device)
    common = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=new_tokens, **common, **options)[0, len(prompt) :].tolist()


def stdlib_prompts(target: Target, count: int, tokens: int = 128) -> list[list[int]]:
    """Return held-out source code of about so many tokens."""
    assert target.tokenizer is not None
    chosen, _ = choose(Stdlib(count=count, prompt_tokens=tokens, seed=0))
    return [target.tokenizer(prompt.turns[0])["input_ids"][: 2 * tokens] for prompt in chosen]


def repetitive(count: int, vocab: int, row: int = 0) -> list[int]:
    """Return a prompt that repeats itself, so that prompt lookup has something to find."""
    return [(7 * (place % 23) + 3 * row + 1) % vocab for place in range(count)]


def make_draft_model(target: Target, seed: int = 1) -> LlamaForCausalLM:
    """Return a small random Llama with a target's vocabulary, to draft at a small model's cost.

    Its drafts are hardly ever accepted: with it, costs can be measured and nothing else.
    """
    of = target.model.config
    heads = max(1, of.num_attention_heads // 4)
    config = LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=64 * heads, intermediate_size=160 * heads,
        num_hidden_layers=max(1, of.num_hidden_layers // 8), num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=of.max_position_embeddings, tie_word_embeddings=True,
        **ENDLESS,
    )  # fmt: skip
    return _random_llama(config, target.device, target.dtype, None, seed)


@torch.inference_mode(False)
def _random_llama(
    config: LlamaConfig, device: torch.device, dtype: torch.dtype, quantization: str | None, seed: int
) -> LlamaForCausalLM:
    if quantization is not None:
        check_quantization(quantization)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType] (its decorator hides self)
    generator = torch.Generator(device).manual_seed(seed)
    for layer in model.model.layers:
        _materialize(layer, device, generator)
        if quantization is not None:
            _shell(config, layers=[layer], quantization=quantization)
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head):
        _materialize(part, device, generator)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its frequencies are no weights
    if quantization is not None:
        model.lm_head = _shell(config, output=model.lm_head, quantization=quantization).lm_head
        mark(model, quantization)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def _shell(
    config: LlamaConfig, *, quantization: str, layers: Sequence[nn.Module] = (), output: nn.Module | None = None
) -> LlamaForCausalLM:
    """Quantize a part of a model, as a model that has nothing else; returns that model."""
    with torch.device("meta"):
        shell = LlamaForCausalLM(copy.copy(config))
    shell.model.layers = nn.ModuleList(layers)
    shell.model.embed_tokens = shell.model.norm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    shell.lm_head = nn.Identity() if output is None else output  # pyright: ignore[reportAttributeAccessIssue]
    quantize(shell, quantization)
    return shell


def _materialize(module: nn.Module, device: torch.device, generator: torch.Generator) -> None:
    """Give a module's parameters memory and values: ones where there is one per channel, small noise in matrices."""
    module.to_empty(device=device)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            parameter.data.normal_(std=0.02, generator=generator)


def chain_scores(runner: ModelRunner, tokens: Tensor, prefix: int) -> Tensor:
    """Return the logits at a chain of tokens ``[1, node]`` in slot 0, behind ``prefix`` entries of the cache."""
    batch = ForwardBatch(
        tokens=tokens,
        slots=torch.zeros(1, dtype=torch.long, device=runner.device),
        lengths=torch.full((1,), prefix, device=runner.device),
        topology=Topology.chain(tokens.shape[1], runner.device),
        key_bound=prefix + tokens.shape[1],
    )
    return runner.run(batch).scores


def some_tokens(count: int, vocab: int) -> Tensor:
    """Return random tokens ``[1, count]``, the same ones for every call with this count."""
    return torch.randint(0, vocab, (1, count), generator=torch.Generator().manual_seed(count))
