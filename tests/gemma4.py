"""Tiny Gemma-4 targets and assistants with random weights."""

from typing import Any

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, PreTrainedModel

from drafters.assistant import buildable
from specdec.target.target import Target
from tests.architectures import tiny_config

VOCAB = 16
KINDS = ["sliding_attention", "full_attention"]


def text(**sizes: Any) -> Any:
    words = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0}
    return tiny_config("gemma4_text", **words | {"sliding_window": 4, "layer_types": KINDS * 2} | sizes)


def sharpened(model: PreTrainedModel) -> Any:
    """The model with weights so large that what it says depends on what it reads."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed_tokens" not in name:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def gemma(*, shared: int) -> Target:
    """A target whose last layers read others' keys and values, or in which every layer has its own."""
    torch.manual_seed(3)
    per_layer = {"hidden_size_per_layer_input": 8} if shared else {}
    return Target(sharpened(Gemma4ForCausalLM(text(num_kv_shared_layers=shared, **per_layer))))


def assistant(width: int = 32, *, clusters: bool = False, **sizes: Any) -> Any:
    torch.manual_seed(4)
    config = Gemma4AssistantConfig(
        text_config=text(hidden_size=16, num_kv_shared_layers=4, **{"vocab_size_per_layer_input": 0} | sizes),
        backbone_hidden_size=width,
        use_ordered_embeddings=clusters,
        num_centroids=4,
        centroid_intermediate_top_k=2,
    )
    with buildable():
        model = sharpened(Gemma4AssistantForCausalLM(config))
    if clusters:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model
