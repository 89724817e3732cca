"""Parts of a block drafter's head that make a place depend on the tokens before it, against their definitions."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafters.heads.block_parts import CandidateSelector, MarkovHead, PrefixHead, Refinement, Refiner


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
