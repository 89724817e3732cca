"""The functions that ``audit_public`` audits, each called as its own code does, on a toy target and drafter.

A subject's docstring says what is wrong with it. ``fix`` is the patch: text of the file, and what should stand there.
"""

import __future__

import ast
import copy
import io
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from specdec import DraftSampling, DraftTree
from verifiers import RejectionVerifier

VOCAB, START, TEMPERATURE, HORIZON = 6, 3, 0.6, 3
"""Tokens 0 to 2 never come: repositories use them as padding, mask and end. A law depends on the token before."""
P, Q = torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
Q += P
P[:, :START] = Q[:, :START] = -torch.inf
WARM = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)])
Round = Callable[[int], Sequence[int]]
"""The tokens that a round adds after a token."""
KNOWN = {"torch": torch, "F": functional, "softmax": torch.softmax, "random": random, "np": np, "copy": copy}
KNOWN |= {"time": time, "Any": Any, "dataclass": dataclass, "dist": torch.distributions}


class Clone:
    """A clone of a repository, from whose files single functions are executed."""

    def __init__(self, folder: str | Path, patched: bool = False):
        self.folder, self.patched = Path(folder), patched

    def take(self, file: str, names: str, fix: Mapping[str, str] | None = None, **given: Any) -> Names:
        """Execute definitions of a file, ``Class.method`` as a function, with ``given`` as the other names they use.

        Raises:
            ValueError: There is no such file or definition, or the text to patch is not there once.
        """
        path = self.folder / file
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give the folder of a clone")
        source = path.read_text().expandtabs(4)
        for old, new in (fix or {}).items() if self.patched else ():
            if source.count(old) != 1:
                raise ValueError(f"{path} has {old!r} {source.count(old)} times, not once: another commit than patched")
            source = source.replace(old, new)
        found: dict[str, ast.stmt] = {}
        for node in ast.parse(source).body:
            name = getattr(node, "name", "")
            found |= {name: node} | {f"{name}.{getattr(each, 'name', '')}": each for each in getattr(node, "body", ())}
        if missing := set(names.split()) - set(found):
            raise ValueError(f"{path} does not define {', '.join(sorted(missing))}")
        space = KNOWN | given
        module = ast.Module([found[name] for name in names.split()], [])
        exec(compile(module, str(path), "exec", __future__.annotations.compiler_flag), space)
        return Names(**space)


def out(path: Tensor, accepted: int, law: Tensor) -> list[int]:
    """Return the tokens of a round: those accepted after the path's first, and one drawn from a law."""
    return [*path[1 : 1 + accepted].tolist(), int(torch.multinomial(law.flatten(), 1))]


def chain(root: int) -> Tensor:
    """Return a token and two drafts drawn after it."""
    first = int(torch.multinomial((Q[root] / TEMPERATURE).softmax(-1), 1))
    return torch.tensor([[root, first, int(torch.multinomial((Q[first] / TEMPERATURE).softmax(-1), 1))]])


def ours(_: Clone) -> Round:
    """Our rejection rule on a tree drawn without replacement: the control."""
    p, q, rule = (P / TEMPERATURE).softmax(-1), (Q / TEMPERATURE).softmax(-1), RejectionVerifier()

    def play(root: int) -> list[int]:
        a, b = torch.multinomial(q[root], 2).tolist()
        tokens = torch.tensor([[root, a, b, int(torch.multinomial(q[a], 1))]])
        how: dict[str, Any] = {"sampling": DraftSampling.WITHOUT_REPLACEMENT, "draft_probs": q[tokens]}
        laws = rule.laws(DraftTree.build(tokens, torch.tensor([[-1, 0, 0, 1]]), **how), p[tokens])
        stop = torch.multinomial(laws.stop[0], 1)
        path = ([0], [0, 1], [0, 2], [0, 1, 3])[stop]
        return out(tokens[0, path], len(path) - 1, laws.after(stop))

    return play


def walk(evaluate: Callable[..., Any], padding: int = -1) -> Round:
    """Rounds with a tree of the drafter's most probable tokens."""

    def play(root: int) -> list[int]:
        a, b = Q[root].topk(2).indices
        c, d = Q[a].topk(2).indices
        paths = torch.tensor([[root, a, c], [root, a, d], [root, b, padding]])
        best, accepted, law = evaluate(P[paths], paths)
        return out(paths[best], accepted, law)

    return play


EAGLE1 = "pad_path generate_tree_buffers generate_candidates evaluate_posterior "
RAW = "gt_logits = logits[best_candidate, accept_length - 1]\n"
WARMED = RAW.replace("logits[", "logits_processor(None, logits[").replace("1]", "1][None])[0]")


def eagle1(code: Names, batched: bool) -> Round:
    """Rounds with a tree drawn without replacement."""
    made = code.generate_tree_buffers([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]], "cpu")

    def play(root: int) -> list[int]:
        first = code.sample(None, Q[root].view(*[1] * batched, 1, VOCAB), WARM, k=2)
        second = code.sample(None, Q[first[0].flatten(-2)], WARM, k=2)
        columns = zip(first[:2], second[:2], strict=True)
        tokens, chances = (functional.pad(torch.cat(each, -2), (0, 3)) for each in columns)  # the clones draw 5
        laws, where = [first[2], second[2]], (made["tree_indices"], made["retrieve_indices"])
        paths, chances, tree = code.generate_candidates((tokens, chances, laws), *where, torch.tensor([[root]]), WARM)
        logits = P[tree][:, where[1]] if batched else P[tree][0, where[1]]
        order = made["p_indices"], tree, made["b_indices"], *[[False]] * batched
        found = code.evaluate_posterior(logits, paths, WARM, chances, laws, *order)
        best, accepted, law = (each[0] for each in found) if batched else found
        return out((paths[0] if batched else paths)[best], accepted, law)

    return play


def eagle(clone: Clone) -> Round:
    """EAGLE-2 and 3: the tree is chosen without a draw, and a token kept with what is left of p."""
    evaluate = clone.take("eagle/model/utils.py", "evaluate_posterior").evaluate_posterior
    return walk(lambda *given: evaluate(*given, WARM))


def eagle_batched(clone: Clone) -> Round:
    """``candidates`` has a batch axis here: ``shape[1]`` is the number of paths, not their length.

    After a whole accepted path with a refused sibling at its end, the next token comes from what is left of the law one
    place earlier. In a chain, a refused first token is drawn again from all of p.
    """
    fix = {"accept_length != candidates.shape[1]": "accept_length != candidates.shape[2]"}
    return eagle1(clone.take("eagle/modeling_eagle.py", EAGLE1 + "EAGLEModel.sample", fix), batched=True)


def spec_bench_eagle(clone: Clone) -> Round:
    """The token behind a whole accepted path is drawn without logits processors: at temperature 1, unfiltered."""
    code = clone.take("model/eagle/utils.py", EAGLE1, {RAW: WARMED}, TOPK=5, Timer=nullcontext)
    code.sample = clone.take("model/eagle/cnets.py", "Model.sample").sample
    return eagle1(code, batched=False)


def spec_bench_eagle3(clone: Clone) -> Round:
    """As ``spec_bench_eagle``."""
    evaluate = clone.take("model/eagle3/utils.py", "evaluate_posterior", {RAW: WARMED}).evaluate_posterior
    return walk(lambda *given: evaluate(*given, WARM))


def sam_decoding(clone: Clone) -> Round:
    """As ``spec_bench_eagle``."""
    fix = {RAW: WARMED.replace("logits_p", "config.logits_p")}
    own = clone.take("samd/utils.py", "eval_posterior", fix, profile_decorator=lambda _: lambda function: function)
    config = Names(greedy=False, logits_processor=WARM)

    def evaluate(*given: Tensor) -> tuple[int, int, Tensor]:
        best, length, law = own.eval_posterior(*given, config)
        return best, length - 1, law

    return walk(evaluate, padding=0)


def sequoia(clone: Clone) -> Round:
    """``verify`` writes the last token over a drafted one before it gathers the accepted ones: it may come twice.

    Besides, ``r`` and ``rand`` are drawn once per prompt, and every round drafts and accepts with them; the patch draws
    both before each ``construct_grow_map``. In float16, as shipped.
    """
    tools = "get_residual get_sampling_logits _make_causal_mask sampling_without_replacement"
    given = vars(clone.take("utils.py", tools))
    given |= vars(clone.take("Tree/Tree.py", "Tree", **given))
    early, gathered = "self.tokens[accept_length] =", "        self.tokens[:accept_length] = self.tokens[accept_list]\n"
    fix = {early: "last =", gathered: f"{gathered}        if not terminal:\n            {early} last\n"}
    own = clone.take("Tree/SpecTree.py", "SpecTree", fix, **given)
    grown: dict[str, Any] = {"roots": [[0], [1, 2], [3, 4]], "branches": [[2], [1, 1]], "size": 5}
    grown |= {
        "Successors": [[1, 2], [3], [4], [], []],
        "mask": torch.ones(5, 5),
        "depth": torch.tensor([0, 1, 1, 2, 2]),
    }
    draws = [lambda *of: given["sampling_without_replacement"](*of, 2, TEMPERATURE)] * 2
    made = {"temperature": TEMPERATURE, "top_p": 1.0, "vocab_size": VOCAB, "max_length": 32, "max_target_seq": 32}
    made |= {"residual_graph": given["get_residual"], "grow_map": grown}
    made |= {"sampling_callables": draws, "sample_gather_indices": [[0, 1], [0, 2]]}
    for name, table in (("draft_model_engine", Q.half()), ("target_model_engine", P.half())):
        made[name] = engine = MagicMock(dtype=torch.float16)
        engine.engine.max_length = 32
        engine.inference = engine.graph_inference = lambda input_ids, of=table, **_: of[input_ids]

    def play(root: int) -> list[int]:
        buffers = {"attn_mask": torch.zeros(32, 32).half(), "position_ids": torch.zeros(32).long()}
        tree, tokens = own.SpecTree(prefix=torch.tensor([root]), **made, **buffers), []
        while len(tokens) <= HORIZON:
            if clone.patched:
                for noise in (tree.r, tree.rand):
                    noise.uniform_()
            tree.construct_grow_map()
            tokens = tree.verify()[0].tolist()
        return tokens[1:]

    return play


def triforce(clone: Clone) -> Round:
    """``Middle_Spec`` draws from all of p after a refusal, but hands on p as the law of its tokens, which it is not."""
    wrong = "else:\n            pred_token_idx = sample(verify_prob[n])"
    fix = {wrong: wrong.replace("verify_prob[n]", "max_fn(verify_prob[n] - speculation_prob)")}
    shown: list[int] = []
    given = vars(clone.take("utils/sampling.py", "top_k_top_p_filter norm_logits sample max_fn"))
    given["spec_stream"] = lambda *of: shown.append(int(of[0]))
    own = clone.take("utils/decoding.py", "TriForce Middle_Spec", fix, **given)
    middle, small = ((each / TEMPERATURE).softmax(-1) for each in ((P + Q) / 2, Q))
    engine = MagicMock(inference=lambda input_ids: P[input_ids])
    engine.engine.model.device = "cpu"
    engine.engine.draft_cache = MagicMock(start_size=0, recent_size=0)
    engine.graph_draft_inference = lambda input_ids, gamma_offset: small[min(int(input_ids[0, -1]), VOCAB - 1)]
    engine.graph_verify = lambda input_ids, position_ids: middle[input_ids[0].clamp(max=VOCAB - 1)]

    def play(root: int) -> list[int]:
        shown.clear()
        engine.engine.kv_cache.seq_len = 0
        how = {"gamma": 1, "max_len": 1, "top_p": 0.0, "temperature": TEMPERATURE, "verbose": True}
        with redirect_stdout(io.StringIO()):
            own.TriForce(Names(eos_token_id=-1), engine, torch.tensor([[root, root]]), **how)
        return shown

    return play


def hsd(clone: Clone) -> Round:
    """The last draft is accepted by the plain product of p / q, the ones before by a product that is capped at 1.

    Python refuses the file for mixing tabs with spaces; read with tabs of four.
    """
    plain = "torch.log(p_i).cumsum(1) - torch.log(q_i).cumsum(1)).unsqueeze(-1)"
    fix = {plain: "torch.log(new_p_previous / joint_q_previous) + torch.log(p_i / q_i).unsqueeze(-1))"}
    own = clone.take("transformers/generation/utils.py", "_speculative_sampling", fix)
    how = {"backward": True, "clever": True, "stop": lambda *_, **__: False}

    def play(root: int) -> list[int]:
        drafted = chain(root)
        laws = Q[drafted[:, :-1]] / TEMPERATURE, 2, P[drafted] / TEMPERATURE
        return own._speculative_sampling(drafted, *laws, torch.tensor([False]), **how)[0][0].tolist()

    return play


def recurrent_drafter(clone: Clone) -> Round:
    """Beams are searched without a draw, but accepted as draws from q, and of several the longest is kept.

    The README says that sampling "might not give the exact distribution match". The patch: one beam, q certain.
    """
    given = {"LOG_0": -50000.0, "LOG_1": 0.0, "BeamShape": lambda *_: None}
    names = "_gather_beams _add_decoding_dim Drafter.beam_search_candidates"
    search = clone.take("recurrent_drafting/modeling_drafter.py", names, **given)
    names = "_select_one_per_row _choose_from_candidates _prepare_next_input"
    own = clone.take("recurrent_drafting/recurrent_drafting.py", names)
    drafter = Names(config=Names(rnn=True), rnn_w=lambda x: x, rnn_u=torch.zeros_like)
    drafter.compute_logits = lambda x: Q[x[..., VOCAB:].argmax(-1)]
    embeddings, shape = torch.nn.Embedding.from_pretrained(torch.eye(VOCAB)), Names(width=2 - clone.patched, length=3)

    def play(root: int) -> list[int]:
        start = torch.zeros(1, VOCAB), torch.tensor([root])
        beams, q = search.beam_search_candidates(drafter, *start, embeddings, shape)
        if clone.patched:
            q = functional.one_hot(beams[..., 1:], VOCAB).log()
        p = (P[beams] / TEMPERATURE).log_softmax(-1)
        count, beam = own._choose_from_candidates(beams, p, q)
        following = own._prepare_next_input(q, p, torch.zeros(*beams.shape, 1), beam, count)[1]
        return [*beams[0, beam[0], 1 : 1 + count[0]].tolist(), int(following)]

    return play


def space(clone: Clone) -> Round:
    """After a refusal the next token is drawn from all of p, not from what is left of it. Temperature is always 1."""
    given: dict[str, Any] = {"_make_causal_mask": lambda shape, *_, **__: torch.zeros(1, 1, shape[1], shape[1])}
    given["_expand_mask"] = lambda mask, *_, tgt_len: torch.zeros(1, 1, tgt_len, mask.shape[1])
    fix = {" / Pc[:, idx]": "; next_token_logit[:, Lc[:, idx]] = 0"}
    own = clone.take("evaluation/inference_space.py", "space_forward", fix, **given)
    mask, inputs = 1, {"attention_mask": torch.ones(1, 1).long()}
    how = {"do_sample": True, "MASK_ID": mask, "MASK_NUM": 1, "MAX_NEW_TOKENS": HORIZON}

    def model(ids: Tensor, **_: Any) -> Names:
        rows, real = [], START
        for token in ids[0].tolist():
            real = real if token == mask else token
            rows.append((Q if token == mask else P)[real])
        return Names(logits=torch.stack(rows)[None], past_key_values=None)

    def play(root: int) -> list[int]:
        given = inputs | {"input_ids": torch.tensor([[root]])}
        return own.space_forward(given, model, Names(eos_token_id=0, pad_token_id=0), 0, **how)[0][0, 1:].tolist()

    return play


def litgpt(clone: Clone) -> Round:
    """``generate`` drops the first token: it goes into the models, but not into ``tokens``. The rule is exact."""
    base = vars(clone.take("litgpt/generate/base.py", "multinomial_num_samples_1 sample_top_p sample next_token"))
    base = {name: base[name] for name in ("multinomial_num_samples_1", "sample_top_p", "next_token")}
    fix = {"    tokens = []\n": "    tokens = [token[0]]\n"}
    own = clone.take("litgpt/generate/speculative_decoding.py", "sample speculative_decoding generate", fix, **base)
    drafter, target = Table(Q), Table(P)

    def play(root: int) -> list[int]:
        how = {"temperature": TEMPERATURE, "include_prompt": False, "speculative_k": 1}
        return own.generate(drafter, target, torch.tensor([root]), 2 + HORIZON, **how)[0].tolist()

    return play


class Table(torch.nn.Module):
    """A model whose logits are rows of a table."""

    max_seq_length = 9

    def __init__(self, rows: Tensor):
        super().__init__()
        self.rows = rows

    def forward(self, *given: Tensor, **named: Any) -> Tensor:
        """Return the rows of ``idx``."""
        return self.rows[given[0] if given else named["idx"]]


def deepspec(clone: Clone) -> Round:
    """Exact in float32. In bfloat16 drafts are drawn from a law that is not the reported one (its issue 31)."""
    names = "logits_to_probs sample_from_probs sample_tokens gather_token_probs sample_residual"
    given = vars(clone.take("deepspec/utils/sampling.py", names))
    names = "DraftProposal VerificationResult verify_draft_tokens"
    own = clone.take("deepspec/eval/base_evaluator.py", names, **given)
    how = {"start": 0, "past_key_values_target": None, "max_proposal_tokens": 2, "temperature": TEMPERATURE}
    how |= {"target_model": lambda input_ids, **_: Names(logits=P[input_ids])}

    def play(root: int) -> list[int]:
        drafted = torch.tensor([[root]])
        for _ in range(2):
            drafted = torch.cat([drafted, own.sample_tokens(Q[drafted[:, -1:]], TEMPERATURE)], 1)
        proposal = own.DraftProposal(2, drafted, own.logits_to_probs(Q[drafted[:, :-1]], TEMPERATURE))
        return own.verify_draft_tokens(proposal=proposal, position_ids=drafted, **how).committed_tokens[0].tolist()

    return play


def medusa(clone: Clone, **how: Any) -> Round:
    """Typical acceptance, with the defaults of ``medusa_generate``: lossy, and the paper says so."""
    names = "pad_path generate_medusa_buffers get_nucleus_one_token get_nucleus_posterior_mask generate_candidates"
    own = clone.take("medusa/model/utils.py", f"{names} evaluate_posterior", TOPK=2)
    made = own.generate_medusa_buffers([[0], [1], [0, 0], [0, 1]], "cpu")
    where = made["tree_indices"], made["retrieve_indices"]
    how = {"temperature": TEMPERATURE, "posterior_threshold": 0.09, "posterior_alpha": 0.3, "fast": True} | how

    def play(root: int) -> list[int]:
        paths, tree = own.generate_candidates(Q[[root, root]][:, None, None], P[root][None, None], *where, **how)
        best, accepted = own.evaluate_posterior(P[tree[0]][where[1]], paths, **how)
        return paths[best, : 1 + accepted].tolist()

    return play


def medusa_nucleus(clone: Clone) -> Round:
    """Every path draws tokens of its own, the longest match is kept, and a mismatch is drawn again."""
    return medusa(clone, sampling="nucleus", top_p=1.0, fast=False)


SUBJECTS: tuple[Callable[[Clone], Round], ...] = (
    ours, eagle, eagle_batched, spec_bench_eagle, spec_bench_eagle3, sam_decoding, sequoia, triforce, hsd,
    recurrent_drafter, space, litgpt, deepspec, medusa, medusa_nucleus,
)  # fmt: skip
WHOLE = {space, litgpt, sequoia}
"""Subjects that return all tokens that are wanted at once, because their rounds share a state."""
NOISY = {sequoia, litgpt}
"""Subjects whose law is only sampled: noise that is more than coins and draws, or many draws that nobody uses."""
TEMPERATURES: dict[Callable[[Clone], Round], float] = {space: 1.0}
