"""Audits of what drafts in transformers besides small models, each with one command and a tiny random checkpoint.

    python examples/audit_transformers.py gemma4
    python examples/audit_transformers.py gemma4 --patched
    python examples/audit_transformers.py dflash
    python examples/audit_transformers.py mtp

Further words go to ``experiments.audit``; ``drafted=4`` makes rounds of four drafts, but for MTP. transformers 5.23.0:
DFlash and MTP pass. Gemma-4's assistants do not, with ``do_sample=True``; about 100 outputs show it.

Where: ``generation/candidate_generator.py``, ``SinglePositionMultiTokenCandidateGenerator.get_candidates``. Line 1344
drafts the most probable token, ``outputs.logits.argmax(dim=-1)``, without a draw and without the logits processors.
Lines 1347 and 1354 return ``outputs.logits`` beside it, and ``_speculative_sampling`` (``generation/utils.py``, line
4450) takes their softmax for the law q that the token x was drawn from. The token was drawn from a law that has all its
mass at x. So x stays with probability min(1, p(x) / q(x)) where it should with p(x), and what comes instead of it is
from max(p - q, 0). An assistant that knows its target well makes sampling nearly greedy: here the law of the first
drafted token is off by a total variation of 0.53 (temperature 0.8, top-p 0.95; mean after 30 random prompts).

A patch: say that nothing was drawn. Without logits ``_assisted_decoding`` keeps a draft that a draw from p equals::

    -        candidate_logits = torch.cat(drafted_logits, dim=1)
    -        return candidate_ids, candidate_logits
    +        return candidate_ids, None

``--patched`` audits this. More drafts stay if they are drawn, as ``MTPCandidateGenerator`` does it: from the softmax of
logits that have gone through ``logits_processor``, which are then returned.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

from drafters.assistant import buildable
from experiments.audit import audit

FOLDER = Path("outputs/tiny")
AUDIT = [
    "engine.max_batch_size=1",
    "undrafted=1",
    "dataset.count=8",
    "max_samples=1280",
    "sampling.ignore_eos=true",
    "threads=1",
]
"""The first token comes from the prompt's forward, without a draft: the second may be a draft, the third a bonus."""
SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def certain(model: Any) -> Any:
    """The model with weights so large that some tokens are likely, and which ones depends on what it reads."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=2.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def gemma4(folder: Path, drafted: int = 1) -> list[str]:
    """A Gemma-4 target of which mostly the last token matters, and an assistant that knows what this token says."""
    sizes = SIZES | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sizes |= {"global_head_dim": 16, "sliding_window": 8, "tie_word_embeddings": False}
    own: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 257}
    none: dict[str, Any] = dict.fromkeys(own, 0)
    target = certain(Gemma4ForCausalLM(Gemma4TextConfig(**sizes, **own, num_kv_shared_layers=2)))
    inner = Gemma4TextConfig(**sizes, **none, num_kv_shared_layers=4)
    config = Gemma4AssistantConfig(text_config=inner, backbone_hidden_size=32, tie_word_embeddings=False)
    with buildable():
        assistant = certain(Gemma4AssistantForCausalLM(config))
    assistant.lm_head.weight.data = target.lm_head.weight.data.clone()
    assistant.pre_projection.weight.data = torch.eye(32, 64)  # of the token's embedding and the state before it
    for name, parameter in (*target.named_parameters(), *assistant.named_parameters()):
        if ".post_" in name and parameter.ndim == 1:
            parameter.data.fill_(0.2)  # what layers add
    save(target, folder)
    assistant.save_pretrained(folder / "assistant")
    return [
        "+contender=hf_assisted",
        f"contenders.hf_assisted.assistant={folder / 'assistant'}",
        f"contenders.hf_assisted.num_tokens={drafted}",
    ]


def dflash(folder: Path, drafted: int = 1) -> list[str]:
    """A Llama, and a DFlash model that reads two of its layers."""
    save(certain(LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3))), folder)
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    drafts = MuseGlimmerAssistantConfig(
        **sizes, num_hidden_layers=2, block_size=drafted + 1, mask_token_id=1, target_layer_ids=[0, 2]
    )
    certain(MuseGlimmerAssistantModel(drafts)).save_pretrained(folder / "assistant")
    options = "+contenders.hf_assisted.options={speculation_type:dflash}"
    return ["+contender=hf_assisted", f"contenders.hf_assisted.assistant={folder / 'assistant'}", options]


def mtp(folder: Path, drafted: int = 1) -> list[str]:
    """A target whose files have an MTP layer for every draft."""
    config = MellumConfig(
        **SIZES, num_hidden_layers=2, mlp_layer_types=["dense"] * 2,
        num_mtp_layers=drafted, mtp_layer_types=["full_attention"] * drafted, mtp_mlp_layer_types=["dense"] * drafted,
    )  # fmt: skip
    model = certain(MellumForCausalLM(config))
    save(model, folder)
    tensors = certain(MtpModel(model, drafted).layers).state_dict(prefix="mtp.layers.")
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return ["+contender=hf_generate", "+contenders.hf_generate.options={use_mtp:true}"]


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a target with a token for every byte, and one that is similar in ``similar``."""
    model.save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    similar = copy.deepcopy(model)
    for parameter in similar.parameters():
        parameter.data += 0.1 * parameter.data.std() * torch.randn_like(parameter)
    similar.save_pretrained(folder / "similar")


def patched(get_candidates: Callable[..., Any]) -> Callable[..., Any]:
    """The patch above."""

    def drafted(*given: Any, **named: Any) -> tuple[torch.Tensor, None]:
        return get_candidates(*given, **named)[0], None

    return drafted


def main() -> None:
    """Write the checkpoint that the first word names, and audit what drafts with it."""
    kinds = {each.__name__: each for each in (gemma4, dflash, mtp)}
    words = [word for word in sys.argv[1:] if word != "--patched"]
    if not words or words[0] not in kinds:
        sys.exit(f"give one of {', '.join(kinds)}, and then options of experiments.audit")
    if "--patched" in sys.argv:
        original = SinglePositionMultiTokenCandidateGenerator.get_candidates
        SinglePositionMultiTokenCandidateGenerator.get_candidates = patched(original)
    logging.disable_progress_bar()
    folder = FOLDER / words[0]
    torch.manual_seed(0)
    try:
        drafted = [int(word.removeprefix("drafted=")) for word in words if word.startswith("drafted=")]
        subject = kinds[words[0]](folder, *drafted)
    except (ValueError, StrictDataclassError) as error:  # no number, or more drafts than a model has layers for
        sys.exit(f"error: {' '.join(str(error).split())}")
    sys.argv[1:] = [f"target.name={folder}", f"assistant={folder / 'similar'}", *subject, *AUDIT, *words[1:]]
    audit.main()


if __name__ == "__main__":
    main()
