"""OpenVINO GenAI 2026.4 behind a draft model: its outputs against the target's law, and against its code's own.

    python -m experiments.audit +contender=openvino contenders.openvino.method=model undrafted=1
    python examples/audit_openvino.py
    python examples/audit_openvino.py --patched

Its environment: docs/experiments.md. With ``do_sample`` and ``draft_model`` it is not lossless; the audit sees it in 32
outputs. Plain decoding, prompt lookup and greedy decoding are right. At temperature 1e-4 it keeps every draft. The
second point is openvino.genai#4190. Lines of ``src/cpp/src/sampling/sampler.cpp`` at da1db864:

- ``validate_candidate``, 1401-1415: a draft d stays if r <= q(d) / p(y), with a draw y from p made for this test, and r
  one of 0, 0.01 ... 1. It should stay with probability min(1, p(d) / q(d)).
- ``sample_from_sequence_group``, 1576-1578: after a rejection ``continue`` goes on to the logits behind d. What they
  give takes d's place (line 1553, ``get_p_prime``, removes d). It should be drawn from max(p - q, 0).
- ``Sampler::sample``, where contexts of requests are made: target and draft model seed their generators alike. So the
  n-th drafted token and the n-th drawn one share their number, and a draft depends on the draw before.

Here the first drafted token's law, after a first token that both know, is off by a total variation of 0.83; by 0.48
in the mean over 16 prompts of the standard library (temperature 0.8, top-p 0.95). ``main`` computes the law of these
lines, and the outputs follow it.

A patch: compare drafts with a draw from p, as prompt lookup does, in both places that ask ``is_prompt_lookup()``::

    -  sampling_params.do_sample, !sampling_params.is_prompt_lookup(), rng_engine);
    +  sampling_params.do_sample, false, rng_engine);
    -  if (!is_validation_passed && sampling_params.do_sample && !sampling_params.is_prompt_lookup()) {
    -      continue;
    -  }

``--patched`` has this effect without a new build, by ``max_ngram_size=1`` beside ``num_assistant_tokens``. Outputs are
then plain decoding's, seed by seed. EAGLE-3 chains go through the same lines; its trees refuse ``do_sample``.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import chisquare
from torch import Tensor

from experiments.contenders.peers import OpenVinoCpu
from specdec.engine.text import encode_prompt
from specdec.filters import nucleus
from specdec.requests import SamplingParams
from specdec.target.loading import load, load_tokenizer
from specdec.target.target import Target


class Patched(OpenVinoCpu):
    """It keeps those drafts that the target's own draws are, as its prompt lookup does."""

    def prepared(self, folder: Path) -> dict[str, Any]:
        """The same with n-grams, whose length changes nothing else beside a draft model."""
        return super().prepared(folder) | {"ngram": 1}


PROMPT, FIRST = ' version of proactor event loop using IOCP."""', "\n    "
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, max_new_tokens=3, ignore_eos=True)
BATCH = 64


@torch.no_grad()
def laws(model: Any, rows: list[list[int]]) -> Tensor:
    """The laws that sampling draws the next tokens of some texts from."""
    logits = model(torch.tensor(rows)).logits[:, -1:] / SAMPLING.temperature
    keep = nucleus(logits, torch.full((len(rows),), SAMPLING.top_p))
    return logits.masked_fill(~keep, -torch.inf).softmax(-1)[:, 0].double()


def theirs(target: Any, drafter: Any, prompt: list[int], first: int) -> tuple[Tensor, Tensor]:
    """The target's law of the token after the first one, and that of their code."""
    (drawn,), (p,), (q,) = laws(target, [prompt]), laws(target, [[*prompt, first]]), laws(drafter, [[*prompt, first]])
    # The number that drew the first token draws the draft: both take the first token, by probability, that it reaches.
    start = drawn[drawn > drawn[first]].sum()
    sizes, tokens = q.sort(descending=True)
    ends = sizes.cumsum(0)
    share = (ends.clamp(max=start + drawn[first]) - (ends - sizes).clamp(min=start)).clamp(min=0) / drawn[first]
    tokens, share = tokens[share > 0], share[share > 0]
    stays = ((100 * q[tokens, None] / p[p > 0]).floor().add(1) / 101).clamp(max=1) @ p[p > 0]
    law = (share * (1 - stays)) @ laws(target, [[*prompt, first, int(token)] for token in tokens])
    return p, law.index_add(0, tokens, share * stays)


def main(outputs: int = 2560) -> None:
    """Print how outputs fit the target's law and their code's."""
    target = Target.from_pretrained("bundled/target", dtype="float32")
    tokenizer = load_tokenizer("bundled/target")
    prompt = encode_prompt(tokenizer, PROMPT)
    (first,) = encode_prompt(tokenizer, FIRST)
    made = (Patched if "--patched" in sys.argv else OpenVinoCpu)(method="model", num_tokens=1)
    made.bind(target, max_batch_size=BATCH, max_length=64)
    made.start()
    found: list[int] = []
    for start in range(0, outputs, BATCH):
        streams = [replace(SAMPLING, stream=start + row) for row in range(BATCH)]
        for each in made.generate([prompt] * BATCH, streams):
            if each.error is not None:
                raise RuntimeError(each.error)
            found += each.token_ids[1:2] if each.token_ids[0] == first else ()
    drafter = load("bundled/drafter", dtype="float32", device="cpu").model
    counts = torch.bincount(torch.tensor(found), minlength=target.vocab_size).double()
    p, law = theirs(target.model, drafter, list(prompt), first)
    print(
        f"{len(found)} outputs; total variation of the target's law and their code's: {(p - law).abs().sum() / 2:.2f}"
    )
    for name, each in (("the target's law", p), ("their code's law", law)):
        often = each * len(found) >= 5
        seen = torch.stack([counts[often], each[often] * len(found)])
        rest = torch.tensor([[counts[~often].sum()], [each[~often].sum() * len(found)]])
        pvalue = chisquare(*torch.cat([seen, rest.clamp(min=1e-9)], 1).numpy(), sum_check=False).pvalue
        off = (counts / len(found) - each).abs().sum() / 2
        print(f"{name}: total variation to the outputs {off:.2f}, p = {pvalue:.2g}")
    for token in torch.maximum(p, law).topk(5).indices:
        shares = f"{p[token]:.3f} by the target, {counts[token] / len(found):.3f} drawn"
        print(f"{tokenizer.decode([int(token)])!r}: {shares}")


if __name__ == "__main__":
    if set(sys.argv[1:]) - {"--patched"}:
        sys.exit(f"error: {' '.join(sys.argv[1:])}: give --patched or nothing")
    try:
        main()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
