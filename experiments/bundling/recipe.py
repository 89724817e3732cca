"""The recipe of the bundled models, stage by stage."""

import json
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import LlamaForCausalLM

from experiments.bundling.card import model_card
from experiments.bundling.config import Recipe
from experiments.bundling.evaluation import bits_per_byte, distinct_4_grams
from experiments.bundling.fitting import Windows, fit
from experiments.bundling.losses import distillation, medusa_distillation, next_token
from experiments.bundling.models import load_target, new_llama, new_medusa_heads, sample_texts, save_llama
from experiments.bundling.text import encode, interleave, load_tokenizer, train_tokenizer
from experiments.datasets.sources import read_source, training_files

NEEDS: dict[str, tuple[str, ...]] = {
    "tokenizer": (),
    "target": ("tokenizer",),
    "samples": ("tokenizer", "target"),
    "drafter": ("tokenizer", "target", "samples"),
    "medusa": ("tokenizer", "target", "samples"),
    "card": ("tokenizer", "target", "samples", "drafter", "medusa"),
}
"""The stages, in their order, and on whose results each of them builds."""


def check_order(config: Recipe) -> None:
    """Refuse stages that build on others which are neither done in ``work`` nor asked for.

    Raises:
        ValueError: Names them, and what to give.
    """
    done = {name for name in NEEDS if (Path(config.work) / name / "done").is_file()}
    for stage in config.stages:
        missing = [] if stage in done else [name for name in NEEDS[stage] if name not in done | {*config.stages}]
        if missing:
            every = [name for name in NEEDS if name in (*missing, *config.stages)]
            raise ValueError(
                f"stage {stage} builds on {', '.join(missing)}, which {config.work} does not have: "
                f"give stages=[{','.join(every)}], or the work=… where they are done"
            )


def run_stages(config: Recipe) -> None:
    """Run the stages that the recipe names, in their order; a stage that is done already is passed over.

    Raises:
        ValueError: A stage builds on one that is neither done nor asked for.
    """
    check_order(config)
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
        fit_config = config.target.fit
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
        own = config.drafter if name == "drafter" else config.medusa
        windows = Windows(mixed, length=own.fit.length, batch_size=own.fit.batch_size, seed=config.seed)
        if name == "drafter":
            model, loss_function = new_llama(config.drafter.model, tokenizer), distillation(target)
        else:
            model, loss_function = new_medusa_heads(target, config.medusa.num_heads), medusa_distillation(target)
        loss = fit(model, loss_function, windows, own.fit, accelerator=accelerator, checkpoint=work / name, name=name)
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
