"""Audits of the kernels that judge drafts in vLLM on GPUs (its model runner V2), in Triton's interpreter on a CPU.

    python examples/audit_vllm_kernels.py standard
    python examples/audit_vllm_kernels.py standard probabilistic
    python examples/audit_vllm_kernels.py block
    python examples/audit_vllm_kernels.py block probabilistic
    python examples/audit_vllm_kernels.py block probabilistic --patched

``standard`` and ``block`` are its ``rejection_sample_method``, ``probabilistic`` its ``draft_sample_method`` (else
greedy). SPECDEC_VLLM_PYTHON names the Python of an environment with vLLM, whose files are imported. Its own
``rejection_sample`` judges rounds of four drafts and its own ``gumbel_sample`` draws them, for a target and a drafter
that are chains of three tokens, so that few outputs tell much. Further words go to ``experiments.audit``. vLLM 0.32.0:
``standard`` passes, ``block`` does not.

Where: ``vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py``, line 572, draws the number u that decides on a
draft from the request's seed and the draft's position, and ``sample/gumbel.py``, line 193, the draft's Gumbel noise
likewise. A request keeps its seed, so whoever drafts for a position again, behind a rejection, meets the same noise
again. The standard rule has not looked at it before: nothing behind the first rejected draft counts. Block verification
(Sun et al., 2403.10444) takes the last i with u <= h (line 629). Where a round ends there, all later u were too large,
and the later drafts had a part in h; so the next round's noise depends on what came out. Here the law of the first four
tokens is off by a total variation of 0.25 with greedy drafts, and of 0.17 with drawn ones (simulated).

A patch: the noise of every round is its own. The position of a round's first token is never that of another round::

    +def of_round(seeds, rows, roots):
    +    return seeds.index_copy(0, rows, seeds[rows] ^ roots * 0x1E3779B97F4A7C15)

    rejection_sampler.py, line 278:
    -            self.sampler.sampling_states.seeds.gpu,
    +            of_round(self.sampler.sampling_states.seeds.gpu, idx_mapping, pos[cu_num_logits[:-1]]),
    speculator.py, line 464 (rows of padding, -1, left out):
    -                seeds,
    +                of_round(seeds, idx_mapping, sample_src_positions - draft_step),

``--patched`` audits this.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, which transformers does

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from audit_transformers import SIZES, save
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging
from triton.runtime import interpreter

from experiments.audit import audit
from experiments.contenders.peers import VllmCpu
from specdec.requests import SamplingParams

FOLDER = Path("outputs/tiny/vllm")
DRAFTED = 4
AUDIT = [
    "function=audit_vllm_kernels.generate",
    f"drafted={DRAFTED}",
    "horizon=4",
    "sampling.top_p=1",
    "sampling.ignore_eos=true",
    "dataset.count=16",
    "mistakes=[one_hot,residual_from_p,shared_noise,temperature_once]",
    "threads=1",
]
"""Some outputs have several rounds within the horizon."""
TARGET = [[1, 7, 12], [2, 2, 16], [14, 1, 5]]
DRAFTER = [[2, 17, 1], [5, 1, 14], [6, 1, 13]]
"""Odds of the next token (out of 20), by the last one."""
ROUND = 0x1E3779B97F4A7C15
"""The constant of the patch."""
decoder: "Decoder"


@triton.jit
def log1p(x: Any):
    """Triton's interpreter has no libdevice."""
    return tl.log(1.0 + x)


@functools.cache
def builtins(module: Any) -> list[str]:
    """The names that Triton's interpreter replaces."""
    return [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]


def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
    """As in ``triton.runtime.interpreter``, which looks at all members of a module at every call inside a kernel."""
    for name in builtins(module):
        if tl.core.is_builtin(member := getattr(module, name)):
            interpreter._patch_attr(module, name, member, builder, scope)


def kernels(python: str) -> tuple[Any, Any]:
    """The two functions, without the rest of vLLM, which does not import here."""
    (packages,) = Path(python).parent.parent.glob("lib/python*/site-packages")
    gpu = "vllm.v1.worker.gpu"
    parents = ["vllm", "vllm.v1", "vllm.v1.worker", gpu, f"{gpu}.sample", f"{gpu}.spec_decode"]
    for name in (*parents, "vllm.v1.watermarking", "vllm.v1.watermarking.prfs"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(packages / name.replace(".", "/"))]
    tools, device = ModuleType("vllm.triton_utils"), ModuleType("libdevice")
    vars(device)["log1p"] = log1p
    vars(tools).update(tl=tl, triton=triton, tldevice=device, HAS_TRITON=True)
    sys.modules[tools.__name__] = tools
    interpreter._patch_builtin = patch_builtin
    rule = import_module(f"{gpu}.spec_decode.rejection_sampler_utils")
    return rule.rejection_sample, import_module(f"{gpu}.sample.gumbel").gumbel_sample


@dataclass
class Decoder:
    """Rounds as vLLM's model runner makes them, around its own functions."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    judge: Callable[..., Any]
    draw: Callable[..., Any]
    block: bool
    probabilistic: bool
    patched: bool

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], sampling: SamplingParams, n: int) -> list[list[int]]:
        """Decode ``n`` outputs, in rounds of ``DRAFTED`` drafts."""
        seeds = torch.randint(2**62, (n,), generator=torch.Generator().manual_seed(sampling.seed or 0))
        outputs = [list(prompt) for _ in range(n)]
        while running := [row for row in range(n) if len(outputs[row]) < len(prompt) + sampling.max_new_tokens]:
            made = self.round([outputs[row] for row in running], seeds[running], sampling.temperature)
            for row, tokens in zip(running, made, strict=True):
                outputs[row] += tokens
        return [each[len(prompt) :] for each in outputs]

    def round(self, sequences: list[list[int]], seeds: torch.Tensor, temperature: float) -> list[list[int]]:
        """Return the tokens that a round adds to every sequence."""
        rows, columns = torch.arange(len(sequences)), torch.arange(DRAFTED + 1)
        positions = torch.tensor([len(each) - 1 for each in sequences])[:, None] + columns
        tokens = torch.zeros(len(rows), int(positions.max()) + 1, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
        if self.patched:
            seeds = seeds ^ positions[:, 0] * ROUND
        temperatures = torch.full((len(rows),), temperature)
        logits = torch.zeros(len(rows), DRAFTED, self.drafter.config.vocab_size)
        for step in range(DRAFTED):
            at = positions[:, step]
            logits[:, step] = self.drafter(tokens).logits[rows, at]
            tokens[rows, at + 1] = (
                self.draw(logits[:, step], rows, temperatures, seeds, at, apply_temperature=True, is_drafting=True)
                if self.probabilistic
                else logits[:, step].argmax(-1)
            )
        sampled, counts = self.judge(
            self.target(tokens).logits[rows[:, None], positions].flatten(0, 1) / temperature,
            logits if self.probabilistic else None,
            tokens.gather(1, positions).flatten(),
            torch.arange(len(rows) + 1) * len(columns),
            positions.flatten(),
            rows,
            rows.repeat_interleave(len(columns)),
            columns.repeat(len(rows)),
            temperatures,
            seeds,
            DRAFTED,
            use_block_verification=self.block,
        )
        return [row[:count] for row, count in zip(sampled.tolist(), counts.tolist(), strict=True)]


def chain(odds: list[list[int]]) -> PreTrainedModel:
    """A Llama in which the last token alone decides the law of the next, at a temperature of 0.8."""
    own: dict[str, Any] = {"hidden_size": 257, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**SIZES | own, num_hidden_layers=1)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    logits = torch.full((257, 257), -40.0)
    logits[:, :3] = 0.8 * torch.tensor(odds, dtype=torch.float32)[torch.arange(257) % 3].log()
    model.model.embed_tokens.weight.data = torch.eye(257)
    model.lm_head.weight.data = logits.T / 257**0.5  # the norm multiplies the embedding by this root
    return model


def generate(prompt: Sequence[int], sampling: SamplingParams, n: int) -> list[list[int]]:
    """The subject, once ``main`` has made it."""
    return decoder(prompt, sampling, n)


def main(*words: str) -> None:
    """Audit what the words name."""
    global decoder
    own = {"standard", "block", "probabilistic", "--patched"}
    python = os.environ.get(VllmCpu.VARIABLE, "")
    if not words or words[0] not in ("standard", "block"):
        sys.exit("error: give standard or block, and then probabilistic, --patched, or options of experiments.audit")
    if not Path(python).is_file():
        sys.exit(f"error: {VllmCpu.VARIABLE}={python} is no program: give the Python of an environment with vLLM 0.32")
    logging.disable_progress_bar()
    target, drafter = chain(TARGET), chain(DRAFTER)
    save(target, FOLDER)
    drafter.save_pretrained(FOLDER / "similar")
    decoder = Decoder(
        target, drafter, *kernels(python), *(name in words for name in ("block", "probabilistic", "--patched"))
    )
    sys.argv[1:] = [
        f"target.name={FOLDER}",
        f"assistant={FOLDER / 'similar'}",
        *AUDIT,
        *(word for word in words if word not in own),
    ]
    audit.main()


if __name__ == "__main__":
    __import__("audit_vllm_kernels").main(*sys.argv[1:])  # under the name that function= says
