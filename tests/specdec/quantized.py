"""Small quantized models, and what they compute by hand: ordinary layers of the same numbers."""

import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec.quantization import quantize
from specdec.quantization.dispatch import DispatchedLinear
from specdec.quantization.int4 import GROUP, Int4Linear
from specdec.quantization.int8 import Int8Linear

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8], [5]]


def small(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """A Llama whose widths the kernel takes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(5.0)
    return model.to(dtype)


class Rounding(nn.Linear):
    """What a quantized layer of a float32 model is said to compute: bfloat16 goes in and comes out."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        outputs = nn.functional.linear(input.bfloat16().float(), self.weight).bfloat16().float()
        return outputs if self.bias is None else outputs + self.bias


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a quantized model with ordinary linear layers of the same numbers, in float32 or its own dtype."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, module in parent.named_children():
            if isinstance(module, DispatchedLinear):
                out, width = module.out_features, module.in_features
                kind = Rounding if module.rounds_to is torch.bfloat16 else nn.Linear
                linear = kind(width, out, bias=module.bias is not None)
                linear.weight = nn.Parameter(by_hand(module))
                if module.bias is not None:
                    linear.bias = module.bias
                setattr(parent, name, linear)
    return plain if plain.dtype is torch.float64 else plain.float()


def by_hand(layer: DispatchedLinear) -> torch.Tensor:
    """The weights of a layer, from what it stores, in float32 or the scale's dtype, whichever is finer."""
    scale = layer.scale if layer.scale.dtype is torch.float64 else layer.scale.float()
    if isinstance(layer, Int4Linear):
        rows = [[nibble - 8 for byte in row for nibble in (byte >> 4, byte & 15)] for row in layer.weight.tolist()]
        numbers = torch.tensor(rows).to(scale.dtype)[:, : layer.in_features]
        return numbers * scale.repeat_interleave(GROUP, dim=1)[:, : layer.in_features]
    numbers = layer.weight if isinstance(layer, Int8Linear) else layer.weight.view(torch.float8_e4m3fn)
    return numbers.to(scale.dtype) * scale[:, None]


def quantized(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Quantized even where that is not faster, or impossible to run fast (fp8 on a CPU)."""
    return quantize(model, name, check=False)
