"""Block drafters: the head and its parts against their definitions, and trees over what it says."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.block import BlockDrafter
from drafters.block_training import TrainedBlock
from drafters.heads.block import BlockHead
from drafters.heads.block_parts import CandidateSelector, MarkovHead, PrefixHead, Refinement, Refiner
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
    """A sublayer between its two convolutions, if it has any."""
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


WINDOW = {"sliding_window": 6, "use_sliding_window": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW, "causal_in_windows": True}


def behind(head: BlockHead, target: Target, known: list[int]) -> tuple[Tensor, Tensor]:
    """The last states and the logits of the block behind a sequence, whose last token is the root."""
    states = target.model(torch.tensor([known]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer][0, :-1] for layer in head.hidden_layers], dim=-1)
    hidden, logits = dense(head, target, features, [known[-1], *[VOCAB - 1] * (head.config.block_size - 1)])
    return hidden.float(), logits.float()


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
    bound, count = head.bound(target.model), head.config.tokens
    places, passes = bound.place_head, head.config.num_jacobi_passes if head.config.xpress_rank else None

    def law(known: list[int], path: list[int]) -> Tensor:
        hidden, logits = behind(head, target, known)
        at, logits = len(path) - 1, logits[-count:]
        before = torch.tensor(known[-2:-1] or known)  # a root without anything before it stands for that
        if places is None:
            return logits[at].softmax(-1)
        if passes:
            root = torch.tensor(path[:1])
            return Refinement(places, passes)(logits[None], hidden[None], root, before)[0, at].softmax(-1)
        given, state = places.prepare(hidden[None], count, before)
        found = logits[:1]
        for place, token in enumerate(path):
            above = {"hidden": given[:, place], "embeds": bound.embed_tokens(torch.tensor([token]))}
            found, state = places(logits[[place]], torch.tensor([token]), place, state=state, **above)
        return found[0].softmax(-1)

    tree, sampling = (None, "iid") if places is None or passes else (TREE, "without_replacement")
    drafter = BlockDrafter(head, tree, sampling=sampling, attention=attention, passes=passes)
    found, _ = agreements(target, drafter, law, prompts=PROMPTS[:3])
    assert all(same for _, same in found) and len(found) > 30
    assert {depth for depth, _ in found} == set(range(count if tree is None else 3))


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


def test_what_makes_no_head_or_drafter_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="passes=2: only xPress's heads"):
        BlockDrafter(head_for(target), passes=2)
    with pytest.raises(ValueError, match="block_size=6: the head mixes 5 places"):
        BlockDrafter(head_for(target, xpress_rank=6), block_size=6)
    with pytest.raises(ValueError, match="not several"):
        head_for(target, xpress_rank=6, selector_rank=6)
    with pytest.raises(ValueError, match=r"head\.config\.markov_rank='abc'"):
        TrainedBlock(config={"markov_rank": "abc"})


# Parts that make a place depend on the tokens before it


def sizes(**settings: Any) -> SimpleNamespace:
    """Settings of a head that its parts read."""
    usual = {"vocab_size": 9, "columns": 7, "hidden_size": 6, "block_size": 4, "xpress_mlp_ratio": 2}
    return SimpleNamespace(**usual | {"markov_biases": True} | settings)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_is_what_the_paper_defines(kind: str) -> None:
    torch.manual_seed(0)
    head = MarkovHead(sizes(markov_head_type=kind, markov_rank=4)).double()
    previous, hidden = torch.tensor([[3, 0, 8]]), torch.randn(1, 3, 6).double()
    path = None
    weights, state = {name: tensor.numpy() for name, tensor in head.state_dict().items()}, np.zeros(4)
    for slot in range(3):
        given = hidden[:, slot] if head.reads_hidden else None
        found, path = head(torch.zeros(1, 7).double(), previous[:, slot], slot, hidden=given, state=path)
        known, h = weights["markov_w1.weight"][previous[0, slot]], hidden[0, slot].numpy()
        if kind == "gated":
            gate = weights["gate_proj.weight"] @ np.concatenate([h, known]) + weights["gate_proj.bias"]
            known = _sigmoid(gate) * known
        if kind == "rnn":
            joint = weights["joint_proj.weight"] @ np.concatenate([state, known, h]) + weights["joint_proj.bias"]
            g, c, o = joint[:4], joint[4:8], joint[8:]
            state, known = _sigmoid(g) * state + (1 - _sigmoid(g)) * np.tanh(c), np.tanh(o)
        np.testing.assert_allclose(found[0].numpy(), weights["markov_w2.weight"] @ known, atol=1e-12)


def _weights(head: torch.nn.Module) -> dict[str, np.ndarray]:
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return {name: tensor.numpy() for name, tensor in head.state_dict().items()}


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@torch.no_grad()
def test_a_selector_scores_candidates_by_the_token_before() -> None:
    torch.manual_seed(0)
    head = CandidateSelector(sizes(selector_rank=4, selector_top_k=3)).double()
    w, logits, hidden = _weights(head), torch.randn(1, 9).double(), torch.randn(1, 6).double()
    found, _ = head(logits, torch.tensor([4]), 0, hidden=hidden)
    candidates = logits[0].topk(3).indices.tolist()
    known = w["predecessor_codebook"][4] * (w["hidden_projection.weight"] @ hidden[0].numpy())
    for token in range(9):
        wanted = logits[0, token] + known @ w["successor_codebook"][token] if token in candidates else -np.inf
        np.testing.assert_allclose(found[0, token], wanted, atol=1e-12)
    # Training leaves the others as they are, so that what is drafted is the same law over the candidates alone.
    whole = head.read(logits, head.note(torch.tensor([4]), 0, hidden)[0], whole=True)
    assert torch.equal(whole.where(found.isfinite(), -torch.inf), found)
    assert torch.equal(whole.where(~found.isfinite(), 0), logits.where(~found.isfinite(), 0))


@torch.no_grad()
def test_a_recurrent_network_runs_down_the_tokens() -> None:
    torch.manual_seed(0)
    head = PrefixHead(sizes(gru_hidden_dim=4, emb_dim=5, pure_draft_prefix_len=1)).double()
    w, state, path = _weights(head), np.zeros(4), None
    for depth in range(3):
        logits, hidden, embeds = (torch.randn(1, size).double() for size in (7, 6, 6))
        found, path = head(logits, torch.tensor([0]), depth, hidden=hidden, state=path, embeds=embeds)
        given, own = w["gru_input.weight"] @ embeds[0].numpy(), w["gru_state.weight"] @ state
        reset, update = _sigmoid(given[:4] + own[:4]), _sigmoid(given[4:8] + own[4:8])
        state = (1 - update) * np.tanh(given[8:] + reset * own[8:]) + update * state
        inner = w["joined.weight"] @ np.concatenate([hidden[0].numpy(), state])
        added = w["columns.weight"] @ (inner * _sigmoid(inner)) if depth else 0
        np.testing.assert_allclose(found[0].numpy(), logits[0].numpy() + added, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("shifted", [False, True])
def test_a_refiner_mixes_the_places_so_far(shifted: bool) -> None:
    """Place by place as defined; all at once the same; and published passes are these, behind the tokens before."""
    torch.manual_seed(0)
    head = Refiner(sizes(xpress_rank=3, shifted=shifted)).double()
    w, count, tokens = _weights(head), 4 if shifted else 3, torch.tensor([[3, 0, 8, 5]])
    hidden, logits, before = torch.randn(1, 4, 6).double(), torch.randn(1, count, 7).double(), torch.tensor([2])
    row = tokens[0].tolist() if shifted else [2, *tokens[0, :3].tolist()]  # the token before each place
    mean, inner, wanted = hidden[0].numpy().mean(0), [], []
    for place in range(4):
        known = [w["down_h.weight"] @ hidden[0, place].numpy(), w["down_g.weight"] @ mean]
        inner.append(w["in_proj.weight"] @ np.concatenate([*known, w["token_embed.weight"][row[place]]]))
        mixed = inner[place] + sum(w["mix_l"][:, place, j] * inner[j] for j in range(place + 1))
        gate = w["mlp_gate.weight"] @ mixed
        mixed = mixed + w["mlp_down.weight"] @ (gate * _sigmoid(gate) * (w["mlp_up.weight"] @ mixed))
        wanted.append(w["readout.weight"] @ mixed)
    wanted = logits[0].numpy() + np.stack(wanted[-count:])
    given, first = head.prepare(hidden, count, before)
    state = first
    for depth in range(count):
        found, state = head(logits[:, depth], tokens[:, depth], depth, hidden=given[:, depth], state=state)
        np.testing.assert_allclose(found[0].numpy(), wanted[depth], atol=1e-12)
    at_once = head.read(logits, head.along(tokens[:, :count], given, first))
    np.testing.assert_allclose(at_once[0].numpy(), wanted, atol=1e-12)
    ids, refined, root = torch.tensor([0, 1, 2, 4, 5, 6, 8]), logits, torch.tensor([3])
    for _ in range(3):
        taken = torch.cat([root[:, None], ids[refined.argmax(-1)][:, :-1]], 1)
        refined = head.read(logits, head.along(taken, given, first))
    torch.testing.assert_close(Refinement(head, 3, ids)(logits, hidden, root, before), refined)
