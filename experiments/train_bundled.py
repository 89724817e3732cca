"""Make the bundled models: ``python -m experiments.train_bundled``.

Stages: a byte-level BPE tokenizer; the target, trained on the standard library's sources; text sampled from it;
a small drafter and Medusa heads, both distilled from it on the sources and on its own text; the model card.
Each finished stage is kept in ``work`` and skipped by the next call; an interrupted one goes on from its last
checkpoint. ``accelerate launch -m experiments.train_bundled`` uses the GPUs there are.
"""

import json
import math
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from omegaconf import DictConfig, OmegaConf
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.medusa_heads import MedusaHeads
from experiments.config import CONF
from experiments.datasets.sources import held_out_files, read_source, training_files
from experiments.fitting import FitConfig, Windows, fit
from experiments.losses import distillation, medusa_distillation, next_token

END_OF_TEXT = "<|endoftext|>"

# Words, numbers and punctuation with the space before them; a line break takes the next line's indentation along.
_PIECES = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[\r\n]+[ \t]*|[ \t]+(?=[ \t])|\s+")


def train_tokenizer(out: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer on the training files and save it for ``AutoTokenizer``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_source(path) for path in training_files()), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False, model_max_length=1024
    )
    fast.save_pretrained(out)


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that ``train_tokenizer`` saved."""
    return PreTrainedTokenizerFast.from_pretrained(path)


def encode(files: list[Path], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """All files as one Int[position] tensor, an end-of-text token after each."""
    ids: list[int] = []
    for text in tokenizer([read_source(path) for path in files])["input_ids"]:
        ids += [*text, tokenizer.eos_token_id]
    return torch.tensor(ids, dtype=torch.int32)


def new_llama(config: DictConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights, tied embeddings and the tokenizer's vocabulary."""
    shape: Any = OmegaConf.to_container(config)
    eos: Any = tokenizer.eos_token_id
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos,
            pad_token_id=None,
            **shape,
        )
    )


def save_llama(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a model in bfloat16, with its tokenizer."""
    model.to(torch.bfloat16).save_pretrained(out)  # pyright: ignore[reportArgumentType] (a decorator hides self)
    tokenizer.save_pretrained(out)


@torch.inference_mode()
def bits_per_byte(
    loss_of: Callable[[Tensor], Tensor], tokenizer: PreTrainedTokenizerFast, *, length: int, device: torch.device
) -> float:
    """Held-out cross entropy in bits per UTF-8 byte, over windows of ``length`` with at least half of it as context.

    Args:
        loss_of: Maps Int[row position] tokens to Float[row position-1] losses in nats.
    """
    nats, size = 0.0, 0
    for path in track(held_out_files(), description="held-out loss", disable=True):
        text = read_source(path)
        size += len(text.encode())
        ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(text)["input_ids"]], device=device)
        scored = 1
        while scored < len(ids):
            end = min(len(ids), max(scored + length // 2, length))
            begin = max(0, end - length)
            losses = loss_of(ids[None, begin:end])[0]
            nats += losses[scored - begin - 1 :].double().sum().item()
            scored = end
    return nats / math.log(2) / size


@torch.inference_mode()
def sample_texts(
    target: LlamaForCausalLM, tokens: Tensor, config: DictConfig, *, seed: int, device: torch.device
) -> Tensor:
    """Continue random training windows with the target itself: Int[position], the sampled windows end to end."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    batches = config.count // config.batch_size
    for index in track(range(batches), description="samples"):
        starts = torch.randint(len(tokens) - config.prompt_length, (config.batch_size,), generator=generator)
        prompts = tokens[starts[:, None] + torch.arange(config.prompt_length)].long().to(device)
        sampled = target.generate(  # pyright: ignore[reportAttributeAccessIssue] (its protocol asks too much)
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_length=config.length,
            min_length=config.length,
            do_sample=index >= config.greedy_fraction * batches,
            top_k=0,
            pad_token_id=0,
        )
        rows.append(sampled.cpu())
        print(f"samples: batch {index + 1}/{batches}", flush=True)
    return torch.cat(rows).flatten().to(torch.int32)


@torch.inference_mode()
def distinct_4_grams(target: LlamaForCausalLM, *, count: int = 8, length: int = 200, device: torch.device) -> float:
    """Mean fraction of distinct 4-grams in ``length`` tokens sampled at temperature 1 from an end-of-text token."""
    eos = target.config.eos_token_id
    assert isinstance(eos, int), "the tokenizer of train_tokenizer has one"
    prompts = torch.full((count, 1), eos, device=device)
    rows = target.generate(  # pyright: ignore[reportAttributeAccessIssue] (its protocol asks too much)
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, pad_token_id=0,
        max_new_tokens=length, min_new_tokens=length,
    )[:, 1:].tolist()  # fmt: skip
    rates = [len({tuple(row[i : i + 4]) for i in range(length - 3)}) / (length - 3) for row in rows]
    return sum(rates) / len(rates)


def main_stages(config: DictConfig) -> None:
    """Run the stages that ``config.stages`` names, in their order."""
    torch.set_num_threads(config.threads)
    set_seed(config.seed)
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    device = accelerator.device
    out, work = Path(config.out), Path(config.work)
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    facts_file = work / "facts.json"
    facts: dict[str, object] = json.loads(facts_file.read_text()) if facts_file.is_file() else {}

    def stage(name: str) -> bool:
        wanted = name in config.stages and not (work / name / "done").is_file()
        if accelerator.is_main_process:
            print(f"stage {name}: {'begins' if wanted else 'done before, or not asked for'}", flush=True)
        return wanted

    def finish(name: str, **more: object) -> None:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            facts.update(more)
            facts_file.write_text(json.dumps(facts, indent=2))
            (work / name).mkdir(exist_ok=True)
            (work / name / "done").touch()
            print(f"stage {name}: done {more}", flush=True)

    if stage("tokenizer"):
        if accelerator.is_main_process:
            train_tokenizer(work / "tokenizer", config.tokenizer.vocab_size)
        finish("tokenizer")
    tokenizer = load_tokenizer(work / "tokenizer")
    tokens = encode(training_files(), tokenizer)

    if stage("target"):
        facts |= {
            "train_tokens": len(tokens),
            "train_bytes": sum(len(read_source(p).encode()) for p in training_files()),
        }
        model = new_llama(config.target.model, tokenizer)
        fit_config = FitConfig(**config.target.fit)
        windows = Windows(tokens, length=fit_config.length, batch_size=fit_config.batch_size, seed=config.seed)
        loss = fit(
            model, next_token, windows, fit_config, accelerator=accelerator, checkpoint=work / "target", name="target"
        )
        save_llama(model, tokenizer, work / "target" / "model")
        model = load_target(work, device)

        def target_loss(ids: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")[
                None
            ]

        bits = bits_per_byte(target_loss, tokenizer, length=fit_config.length, device=device)
        distinct = distinct_4_grams(model, device=device)
        finish("target", target_train_loss=loss, target_bits_per_byte=bits, target_distinct_4_grams=distinct)

    if stage("samples"):
        torch.save(
            sample_texts(load_target(work, device), tokens, config.samples, seed=config.seed, device=device),
            work / "samples.pt",
        )
        finish("samples")

    for name in ("drafter", "medusa"):
        if not stage(name):
            continue
        target = load_target(work, device)
        # Half of the target's own text, half sources: what a drafter meets when it runs is the former.
        sampled = torch.load(work / "samples.pt", weights_only=True)
        mixed = interleave(sampled, tokens, length=config.samples.length)
        fit_config = FitConfig(**config[name].fit)
        windows = Windows(mixed, length=fit_config.length, batch_size=fit_config.batch_size, seed=config.seed)
        if name == "drafter":
            model, loss_function = new_llama(config.drafter.model, tokenizer), distillation(target)
        else:
            model = MedusaHeads(
                num_heads=config.medusa.num_heads,
                hidden_size=target.config.hidden_size,
                vocab_size=target.config.vocab_size,
                base_model="bundled/target",
            )
            heads: Any = model.heads
            for head in heads:  # as the published recipe starts: every head is the target's own output layer
                head[-1].weight.data.copy_(target.lm_head.weight)
            loss_function = medusa_distillation(target)
        loss = fit(
            model, loss_function, windows, fit_config, accelerator=accelerator, checkpoint=work / name, name=name
        )
        if isinstance(model, LlamaForCausalLM):
            save_llama(model, tokenizer, work / name / "model")
        else:
            model.to(torch.bfloat16).save_pretrained(work / name / "model")
        finish(name, **{f"{name}_loss": loss})

    if stage("card") and accelerator.is_main_process:
        for name in ("target", "drafter", "medusa"):
            shutil.copytree(work / name / "model", out / name, dirs_exist_ok=True)
        (out / "MODEL_CARD.md").write_text(model_card(facts, config))
        print(f"wrote the models and MODEL_CARD.md to {out}")


def load_target(work: Path, device: torch.device) -> LlamaForCausalLM:
    """The trained target, frozen, in the dtype it ships in: what is distilled is what is drafted for."""
    model = AutoModelForCausalLM.from_pretrained(work / "target" / "model", dtype=torch.bfloat16)
    return model.to(device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType, reportReturnType]


def interleave(first: Tensor, second: Tensor, *, length: int) -> Tensor:
    """As much of ``second`` as there is of ``first``, window by window of ``length``: Int[position]."""
    count = min(len(first), len(second)) // length
    return torch.stack(
        [first[: count * length].view(count, length), second[: count * length].view(count, length)], 1
    ).flatten()


def model_card(facts: dict[str, object], config: DictConfig) -> str:
    """The card in Markdown, from what the stages recorded."""
    recipe = OmegaConf.to_yaml(
        OmegaConf.masked_copy(
            config, ["tokenizer", "target", "samples", "drafter", "medusa", "seed", "mixed_precision"]
        )
    )
    return f"""# Model card: the bundled models

Small models for demonstrations and tests of speculative decoding. They write Python that looks right; nobody
should use them for anything else.

| | |
|---|---|
| data | the standard library's sources of CPython {platform.python_version()} (PSF licence; none of the text ships here): {facts.get("train_bytes", 0):,} bytes, {facts.get("train_tokens", 0):,} tokens |
| held out | argparse, asyncio, email, json, logging, pickle, statistics, tarfile, typing, unittest; test folders and encodings are left out besides |
| target | Llama, bf16; held-out loss {facts.get("target_bits_per_byte", float("nan")):.3f} bits per byte; {facts.get("target_distinct_4_grams", float("nan")):.0%} distinct 4-grams in 200 tokens sampled at temperature 1 |
| drafter | Llama, bf16, distilled from the target; final training loss {facts.get("drafter_loss", float("nan")):.4f} (total variation to the target) |
| Medusa heads | FasterDecoding's first format, distilled from the frozen target; final training loss {facts.get("medusa_loss", float("nan")):.4f} (weighted total variation, summed over the heads) |
| made by | `python -m experiments.train_bundled`, torch {torch.__version__} |

The drafter and the heads are trained on equal parts of the sources and of the target's own samples (a quarter of
them greedy), first with the forward KL divergence, then with total variation.

```yaml
{recipe}```
"""


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train_bundled")
def main(config: DictConfig) -> None:
    """Make the models by the recipe of one configuration."""
    main_stages(config)


if __name__ == "__main__":
    main()
