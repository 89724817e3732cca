"""Block drafters: the head and its parts against their definitions, and trees over what it says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import BlockDrafter, BlockHead
from specdec import Sizes, Target
from tests.components import TREE
from tests.drafters import pairs
from tests.drafters.agreeing import PROMPTS, agreements
from tests.forwards import drafted, outcome_of, slots_of

VOCAB, HIDDEN = 64, 32


def head_for(target: Target, *, seed: int = 3, **settings: Any) -> BlockHead:
    """A head whose random weights are large enough that everything it reads shows in its logits."""
    torch.manual_seed(seed)
    settings = {"block_size": 5, "mask_token_id": VOCAB - 1, "hidden_layers": (1, 3)} | settings
    head = BlockHead.for_target(target.model, **settings).eval()
    for parameter in head.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return head


def _convolved(x: Tensor, base: Tensor, added: Tensor) -> Tensor:
    """One place and one tap after the other; ``added`` is ``[place, tap, group]``."""
    out, size = torch.zeros_like(x), x.shape[1] // added.shape[2]
    for place in range(len(x)):
        for tap in range(min(len(base), place + 1)):
            out[place] += (base[tap] + added[place, tap].repeat_interleave(size)) * x[place - tap]
    return out


def _around(x: Tensor, part: dict[str, Tensor], conv: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    base = part.get(f"{conv}.base_kernel")
    if base is None:
        return sublayer(x)
    added = (x @ part[f"{conv}.kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1)
    return _convolved(sublayer(_convolved(x, base[0], added[:, 0])), base[1], added[:, 1])


@torch.no_grad()
def dense(head: BlockHead, target: Target, features: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The last states and the logits of one block behind a context, in float64, as the papers describe them."""
    config = head.config
    weights = {name: tensor.detach().double() for name, tensor in head.state_dict().items()}
    table = target.model.get_input_embeddings().weight.double()
    output = target.model.get_output_embeddings().weight.double()
    theta, eps, dim = config.rope_parameters["rope_theta"], config.rms_norm_eps, config.head_dim
    count, slots = len(features), len(tokens)
    place = torch.arange(count + slots)
    context = pairs.norm(features.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = table[tokens] * config.input_embedding_scale
    for index in range(config.num_hidden_layers):
        part = pairs.under(weights, f"layers.{index}.")
        slides = config.layer_types[index] == "sliding_attention"

        def attended(normed: Tensor, part: dict[str, Tensor] = part, slides: bool = slides) -> Tensor:
            both = torch.cat([context, normed])
            query = (normed @ part["self_attn.q_proj.weight"].T).view(slots, -1, dim)
            key = (both @ part["self_attn.k_proj.weight"].T).view(count + slots, -1, dim)
            value = (both @ part["self_attn.v_proj.weight"].T).view(count + slots, -1, dim)
            if config.layer_kind == "qwen3":
                query = pairs.norm(query, part["self_attn.q_norm.weight"], eps)
                key = pairs.norm(key, part["self_attn.k_norm.weight"], eps)
            query, key = pairs.turned(query, theta, place[count:]), pairs.turned(key, theta, place)
            groups = query.shape[1] // key.shape[1]
            scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) / dim**0.5
            if config.causal_in_windows if slides and config.causal_in_windows is not None else config.causal:
                scores = scores.masked_fill(place > place[count:, None], -torch.inf)
            if slides:
                counted_from = torch.full((slots, 1), count) if config.window_from_root else place[count:, None]
                scores = scores.masked_fill(counted_from - place >= config.sliding_window, -torch.inf)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(groups, 1))
            return mixed.reshape(slots, -1) @ part["self_attn.o_proj.weight"].T

        mlp = partial(pairs.mlp, weights=pairs.under(part, "mlp."))
        x = x + _around(pairs.norm(x, part["input_layernorm.weight"], eps), part, "attention_conv", attended)
        x = x + _around(pairs.norm(x, part["post_attention_layernorm.weight"], eps), part, "mlp_conv", mlp)
    hidden = pairs.norm(x, weights["norm.weight"], eps)
    logits, cap = hidden @ output.T * config.output_multiplier, config.final_logit_softcapping
    return hidden, logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def behind(head: BlockHead, target: Target, known: list[int]) -> tuple[Tensor, Tensor]:
    """The last states of the block behind a sequence, whose last token is the root, and the logits of its places."""
    states = target.model(torch.tensor([known]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer][0, :-1] for layer in head.hidden_layers], dim=-1)
    hidden, logits = dense(head, target, features, [known[-1], *[VOCAB - 1] * (head.config.block_size - 1)])
    return hidden.float(), logits[-head.config.tokens :].float()


@torch.no_grad()
def read(head: BlockHead, table: Tensor, hidden: Tensor, logits: Tensor, before: int, path: list[int]) -> Tensor:
    """A place's logits behind the tokens from the root to it, by the papers' definition of the part that reads them."""
    config, place, silu = head.config, len(path) - 1, torch.nn.functional.silu
    if head.place_head is None:
        return logits[place]
    w, states = head.place_head.state_dict(), hidden[-len(logits) :]
    if config.markov_rank:
        state = known = torch.zeros(config.markov_rank)
        for token, own in zip(path, states[: len(path)], strict=True):
            known = w["markov_w1.weight"][token]
            if config.markov_head_type == "gated":
                gate = w["gate_proj.weight"] @ torch.cat([own, known]) + w["gate_proj.bias"]
                known = gate.sigmoid() * known
            if config.markov_head_type == "rnn":
                joint = w["joint_proj.weight"] @ torch.cat([state, known, own]) + w["joint_proj.bias"]
                gate, candidate, output = joint.chunk(3)
                state, known = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh(), output.tanh()
        return logits[place] + w["markov_w2.weight"] @ known
    if config.selector_rank:
        candidates = logits[place].topk(config.selector_top_k).indices
        known = w["predecessor_codebook"][path[-1]] * (w["hidden_projection.weight"] @ states[place])
        scores = logits[place][candidates] + w["successor_codebook"][candidates] @ known
        return torch.full_like(logits[place], -torch.inf).scatter(0, candidates, scores)
    if config.gru_hidden_dim:
        state = torch.zeros(config.gru_hidden_dim)
        for token in path:
            reset, update, new = (w["gru_input.weight"] @ table[token]).chunk(3)
            own_reset, own_update, own_new = (w["gru_state.weight"] @ state).chunk(3)
            update = (update + own_update).sigmoid()
            state = (1 - update) * (new + (reset + own_reset).sigmoid() * own_new).tanh() + update * state
        inner = w["joined.weight"] @ torch.cat([states[place], state])
        return logits[place] + (w["columns.weight"] @ silu(inner) if place >= config.pure_draft_prefix_len else 0)
    inner = []
    for token, own in zip(path if config.shifted else [before, *path], hidden, strict=False):
        known = w["down_h.weight"] @ own, w["down_g.weight"] @ hidden.mean(0), w["token_embed.weight"][token]
        inner.append(w["in_proj.weight"] @ torch.cat(known))
    mixed = inner[-1] + sum(w["mix_l"][:, len(inner) - 1, other] * each for other, each in enumerate(inner))
    mixed = mixed + w["mlp_down.weight"] @ (silu(w["mlp_gate.weight"] @ mixed) * (w["mlp_up.weight"] @ mixed))
    return logits[place] + w["readout.weight"] @ mixed


WINDOW = {"sliding_window": 6, "use_sliding_window": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW, "causal_in_windows": True}
SHIFTED = {"shifted": True, "markov_rank": 6}
SECOND = {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 8}


@pytest.mark.parametrize(
    ("settings", "attention"),
    [
        ({}, "grouped"),
        ({"shifted": True}, "eager"),
        ({"causal": True}, "grouped"),
        ({"layer_kind": "llama", "layer_types": ["full_attention", "sliding_attention"], **WINDOW}, "grouped"),
        ({"layer_types": ["sliding_attention", "sliding_attention"], **WINDOW, "causal": True}, "eager"),
        (MIXED, "grouped"),
        ({"conv_kernel_size": 3, "conv_group_size": 8}, "grouped"),
        ({**MIXED, "sliding_window": 3, "window_from_root": True}, "eager"),
        ({**MIXED, "sliding_window": 3, "window_from_root": True, "causal_in_windows": False}, "dense"),
        ({"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}, "grouped"),
        # Heads whose places depend on the tokens before them.
        (SHIFTED, "grouped"),
        (SHIFTED | {"markov_head_type": "gated"}, "grouped"),
        (SHIFTED | {"markov_head_type": "rnn"}, "grouped"),
        (SECOND, "grouped"),
        ({"shifted": True, "gru_hidden_dim": 5, "emb_dim": 6, "pure_draft_prefix_len": 1}, "grouped"),
        ({"gru_hidden_dim": 5, "emb_dim": 6}, "grouped"),
        ({"xpress_rank": 6, "num_jacobi_passes": 0}, "grouped"),
        ({"xpress_rank": 6, "num_jacobi_passes": 0, "shifted": True}, "grouped"),
        ({"xpress_rank": 6, "num_jacobi_passes": 2}, "grouped"),  # passes over a block, before anything is drafted
    ],
)
def test_every_place_s_law_is_what_the_papers_define(target: Target, settings: dict[str, Any], attention: str) -> None:
    """Ragged rows, one without any context; the tokens above a node change its law where the head reads them."""
    head = head_for(target, **settings)
    passes = head.config.num_jacobi_passes if head.config.xpress_rank else None

    def law(known: list[int], path: list[int]) -> Tensor:
        hidden, logits = behind(head, target, known)
        before = known[max(len(known) - 2, 0)]  # a root without anything before it stands for that
        after = partial(read, head, target.model.get_input_embeddings().weight, hidden, logits, before)
        refined = logits
        for _ in range(passes or 0):
            taken = [path[0], *refined.argmax(-1).tolist()]
            refined = torch.stack([after(taken[: place + 1]) for place in range(len(logits))])
        return (refined[len(path) - 1] if passes else after(path)).softmax(-1)

    tree, sampling = (None, "iid") if head.place_head is None or passes else (TREE, "without_replacement")
    drafter = BlockDrafter(head, tree, sampling=sampling, attention=attention, passes=passes)
    found, _ = agreements(target, drafter, law, prompts=PROMPTS[:3])
    assert all(same for _, same in found) and len(found) > 30
    assert {depth for depth, _ in found} == set(range(head.config.tokens if tree is None else 3))


@torch.no_grad()
def test_training_scores_a_selectors_candidates_as_drafting_does(target: Target) -> None:
    """And leaves the logits of other tokens as they are."""
    selector, logits, note = head_for(target, **SECOND).candidate_selector, torch.randn(3, VOCAB), torch.randn(3, 6)
    drafting, whole = selector.read(logits, note), selector.read(logits, note, whole=True)
    assert torch.equal(whole, drafting.where(drafting.isfinite(), logits))
    assert drafting.isfinite().sum(-1).tolist() == [5] * 3


@torch.no_grad()
def test_confidence_is_known_before_a_token_is_drawn(target: Target) -> None:
    head, tokens = head_for(target, shifted=True, markov_rank=6, confidence=True), torch.tensor([[4, 5]])
    weight, bias = head.confidence_head.proj.weight, head.confidence_head.proj.bias
    session = BlockDrafter(head, [2, 1]).bind(target, Sizes(max_batch_size=1, max_length=40))
    states = target.model(torch.tensor([[1, 2]]), output_hidden_states=True).hidden_states
    session.observe(outcome_of([[1, 2]], [2], hidden_states={layer: states[layer] for layer in head.hidden_layers}))
    drafted(session, slots_of([[1, 2, 3]], vocab_size=VOCAB, max_length=40))
    above = head.markov_head.markov_w1.weight[tokens[0]]
    hidden = behind(head, target, [1, 2, 3])[0][1].expand(2, -1)
    wanted = torch.sigmoid(torch.cat([hidden, above], 1) @ weight.T + bias)[:, 0]
    torch.testing.assert_close(session.scorer.confidence(tokens, 1)[0], wanted, atol=1e-5, rtol=1e-4)
