"""Block drafters: the head against its definition, and trees over what it says."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from drafters.block import BlockDrafter
from drafters.heads.block import BlockHead, default_layers
from drafters.heads.markov import MarkovHead
from specdec.drafting.scored import ScoredSession
from specdec.forward import LOGITS, ForwardBatch, Wants
from specdec.interfaces import Sizes
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.topology import Topology
from specdec.types import DraftSampling, Outcome
from tests.forwards import drafted, outcome_of, slots_of
from tests.models import tiny_model

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


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE by its definition: pairs (i, i + d/2) as complex numbers, turned by position times frequency."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@torch.no_grad()
def dense_logits(head: BlockHead, target: Target, features: Tensor, tokens: list[int], *, causal: bool) -> Tensor:
    """The logits of one block behind one row's context, in float64, written from the papers' description."""
    config = head.config
    weights = {name: tensor.detach().double() for name, tensor in head.state_dict().items()}
    table = target.model.get_input_embeddings().weight.double()
    output = target.model.get_output_embeddings().weight.double()
    theta, eps, dim = config.rope_parameters["rope_theta"], config.rms_norm_eps, config.head_dim
    count, slots = len(features), len(tokens)
    place = torch.arange(count + slots)
    context = _norm(features.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = table[tokens] * config.input_embedding_scale
    hidden = x
    for index in range(config.num_hidden_layers):
        part = {n.removeprefix(f"layers.{index}."): w for n, w in weights.items() if n.startswith(f"layers.{index}.")}
        normed = _norm(x, part["input_layernorm.weight"], eps)
        both = torch.cat([context, normed])
        query = (normed @ part["self_attn.q_proj.weight"].T).view(slots, -1, dim)
        key = (both @ part["self_attn.k_proj.weight"].T).view(count + slots, -1, dim)
        value = (both @ part["self_attn.v_proj.weight"].T).view(count + slots, -1, dim)
        if config.layer_kind == "qwen3":
            query = _norm(query, part["self_attn.q_norm.weight"], eps)
            key = _norm(key, part["self_attn.k_norm.weight"], eps)
        query, key = _turned(query, place[count:], theta), _turned(key, place, theta)
        groups = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) / dim**0.5
        slides = config.layer_types[index] == "sliding_attention"
        if config.causal_in_windows if slides and config.causal_in_windows is not None else causal:
            scores = scores.masked_fill(place > place[count:, None], -torch.inf)
        if slides:
            counted_from = torch.full((slots, 1), count) if config.window_from_root else place[count:, None]
            scores = scores.masked_fill(counted_from - place >= config.sliding_window, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(groups, 1))
        x = x + mixed.reshape(slots, -1) @ part["self_attn.o_proj.weight"].T
        normed = _norm(x, part["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(normed @ part["mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
        hidden = x
    logits = _norm(hidden, weights["norm.weight"], eps) @ output.T * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


ROWS = (7, 0, 3)


def context_of(head: BlockHead, rows: tuple[int, ...] = ROWS) -> Tensor:
    return torch.randn(len(rows), max(rows), head.feature_width, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=VOCAB))


WINDOW = {"sliding_window": 6, "use_sliding_window": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW, "causal_in_windows": True}


def forward_block(runner: ModelRunner, head: BlockHead, features: Tensor, tokens: Tensor, topology: Topology) -> Tensor:
    """The logits of one block a row: the context in two pieces, into slots that are not in order."""
    slots = np.array([2, 0, 3])
    lengths = np.array(ROWS)
    for start, stop in ((0, 4), (4, 7)):
        piece = features[:, start:stop]
        runner.run(
            ForwardBatch(
                tokens=torch.zeros(piece.shape[:2], dtype=torch.long),
                slots=torch.from_numpy(slots),
                lengths=torch.full((3,), start),
                topology=Topology.chain(piece.shape[1], runner.device),
                features=piece,
                wants=Wants(logits=0),
            )
        )
    output = runner.run(
        ForwardBatch(
            tokens=tokens,
            slots=torch.from_numpy(slots),
            lengths=torch.from_numpy(lengths),
            topology=topology,
            wants=LOGITS,
        )
    )
    return output.scores


@pytest.mark.parametrize(
    ("settings", "attention"),
    [
        ({}, "grouped"),
        ({}, "eager"),
        ({"causal": True}, "grouped"),
        ({"layer_kind": "llama"}, "grouped"),
        ({"layer_types": ["full_attention", "sliding_attention"], **WINDOW}, "grouped"),
        ({"layer_types": ["sliding_attention", "sliding_attention"], **WINDOW, "causal": True}, "eager"),
        (MIXED, "grouped"),
        ({**MIXED, "sliding_window": 3, "window_from_root": True}, "grouped"),
        ({**MIXED, "sliding_window": 3, "window_from_root": True}, "eager"),
        ({**MIXED, "sliding_window": 3, "window_from_root": True, "causal_in_windows": False}, "dense"),
        ({"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}, "grouped"),
    ],
)
def test_a_block_behind_its_context_is_what_the_papers_define(
    target: Target, settings: dict[str, Any], attention: str
) -> None:
    """Ragged rows, one without any context; again once the forward is captured."""
    head = head_for(target, **settings)
    runner = ModelRunner(
        head.bound(target.model), max_batch_size=4, max_length=32, max_nodes=4, attention=attention, optimize=True
    )
    width = head.config.block_size
    topology = head.config.block(width, runner.device)
    features = context_of(head)
    tokens = torch.full((3, width), VOCAB - 1)
    tokens[:, 0] = torch.tensor([5, 9, 11])
    wanted = [
        dense_logits(head, target, features[row, :length], tokens[row].tolist(), causal=head.config.causal)
        for row, length in enumerate(ROWS)
    ]
    for _ in range(30 if attention == "grouped" else 1):  # more than it takes to be captured
        found = forward_block(runner, head, features, tokens, topology)
    for row in range(3):
        torch.testing.assert_close(found[row].double(), wanted[row], atol=2e-4, rtol=2e-4)
    if attention == "grouped":
        assert runner.executor.recordings.keys, "nothing was captured"


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_is_what_the_paper_defines(kind: str) -> None:
    torch.manual_seed(0)
    head = MarkovHead(kind, vocab_size=9, draft_vocab_size=7, hidden_size=6, rank=4).double()
    previous, hidden = torch.tensor([[3, 0, 8]]), torch.randn(1, 3, 6).double()
    path = None
    weights, state = {name: tensor.numpy() for name, tensor in head.state_dict().items()}, np.zeros(4)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    for slot in range(3):
        found, path = head(previous[:, slot], hidden[:, slot] if head.reads_hidden else None, path)
        known, h = weights["markov_w1.weight"][previous[0, slot]], hidden[0, slot].numpy()
        if kind == "gated":
            gate = weights["gate_proj.weight"] @ np.concatenate([h, known]) + weights["gate_proj.bias"]
            known = sigmoid(gate) * known
        if kind == "rnn":
            joint = weights["joint_proj.weight"] @ np.concatenate([state, known, h]) + weights["joint_proj.bias"]
            g, c, o = joint[:4], joint[4:8], joint[8:]
            state, known = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c), np.tanh(o)
        np.testing.assert_allclose(found[0].numpy(), weights["markov_w2.weight"] @ known, atol=1e-12)


def test_the_usual_layers() -> None:
    assert default_layers(36, 5) == [1, 9, 17, 25, 33]
    assert default_layers(28, 1) == [14]


def bound(target: Target, head: BlockHead, tree: Any = None, **options: Any) -> ScoredSession:
    return BlockDrafter(head, tree, **options).bind(target, Sizes(max_batch_size=3, max_length=40))


def committed(states: dict[int, Tensor], counts: list[int]) -> Outcome:
    shape = next(iter(states.values())).shape[:2]
    return outcome_of(torch.zeros(shape, dtype=torch.long), counts, hidden_states=states)


def states_for(target: Target, drafter: ScoredSession, rows: int = 2, positions: int = 6) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {layer: torch.randn(rows, positions, HIDDEN, generator=generator) for layer in drafter.hidden_layers}


def reference_for(target: Target, drafter: ScoredSession, states: dict[int, Tensor], row: int, root: int) -> Tensor:
    """Logits of depth 1, 2, … in a row, of a head without a Markov head."""
    features = torch.cat([states[layer][row] for layer in drafter.hidden_layers], dim=-1)
    tokens = [root, *[VOCAB - 1] * (drafter.drafter.block_size - 1)]
    logits = dense_logits(drafter.drafter.head, target, features, tokens, causal=drafter.drafter.head.config.causal)
    return logits if drafter.drafter.head.config.shifted else logits[1:]


@pytest.mark.parametrize("settings", [{}, {"shifted": True}, {**MIXED, "sliding_window": 3, "window_from_root": True}])
def test_a_greedy_chain_takes_the_slots_best_tokens(target: Target, settings: dict[str, Any]) -> None:
    drafter = bound(target, head_for(target, **settings))
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    tree = drafted(drafter, slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40))
    for row, root in enumerate((8, 9)):
        wanted = reference_for(target, drafter, states, row, root).argmax(-1)
        assert tree.tokens[row].tolist() == [root, *wanted.tolist()]
    assert tree.max_depth == (5 if settings.get("shifted") else 4)


def test_code_that_does_not_know_mixed_layers_is_not_used(target: Target) -> None:
    with pytest.raises(ValueError, match=r"attention='native': .* sliding layers .*: give auto or grouped"):
        bound(target, head_for(target, **MIXED), attention="native")
    assert bound(target, head_for(target, **MIXED)).scorer.runner.attention_name == "grouped"


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_q_is_conditioned_on_the_branch(target: Target, kind: str) -> None:
    """Every node's q: the slot's logits and what the tokens above the node add to them."""
    head = head_for(target, shifted=True, markov_rank=6, markov_head_type=kind)
    shape = [(0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0)]
    drafter = bound(target, head, shape, sampling="without_replacement")
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    params = [SamplingParams(temperature=1.0)] * 2
    tree = drafted(drafter, slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, params=params, max_length=40))
    assert (tree.law == int(DraftSampling.WITHOUT_REPLACEMENT)).all()
    bound_head = head.bound(target.model)
    for row in range(2):
        features = torch.cat([states[layer][row] for layer in drafter.hidden_layers], dim=-1)[None]
        cache = DynamicCache()
        with torch.no_grad():
            bound_head(features=features, past_key_values=cache)
            tokens = torch.tensor([[8 + row, *[VOCAB - 1] * 4]])
            output = bound_head(
                input_ids=tokens, attention_mask=torch.zeros(1, 1, 5, 11), past_key_values=cache,
                output_hidden_states=True,
            )  # fmt: skip
            parents = tree.parents[row].tolist()
            for node in {parent for parent in parents if parent >= 0}:
                path, at = [], node
                while at >= 0:
                    path.append(int(tree.tokens[row, at]))
                    at = parents[at]
                depth = len(path)
                hidden, state, added = output.hidden_states[-1], None, torch.zeros(1)
                for place, token in enumerate(path[::-1]):
                    given = hidden[:, place] if head.markov_head.reads_hidden else None
                    added, state = head.markov_head(torch.tensor([token]), given, state)
                wanted = (output.logits[0, depth - 1] + added[0]).softmax(-1)
                torch.testing.assert_close(tree.draft_probs[row, node], wanted, atol=1e-4, rtol=1e-3)


def test_confidence_is_known_before_a_token_is_drawn(target: Target) -> None:
    head = head_for(target, shifted=True, markov_rank=6, confidence=True)
    drafter = bound(target, head, [2, 1])
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    slots = slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40)
    drafted(drafter, slots)
    scorer = drafter.scorer
    tokens = torch.tensor([[4, 5], [6, 7]])
    found = scorer.confidence(tokens, 1)
    weight, bias = head.confidence_head.proj.weight.double(), head.confidence_head.proj.bias.double()
    hidden = scorer._hidden[:, 1].double()
    with torch.no_grad():
        for row, column in itertools.product(range(2), range(2)):
            known = head.markov_head.markov_w1.weight[tokens[row, column]].double()
            wanted = torch.sigmoid(weight @ torch.cat([hidden[row], known]) + bias)
            torch.testing.assert_close(found[row, column].double(), wanted[0], atol=1e-5, rtol=1e-5)
    plain = bound(target, head_for(target))
    plain.observe(committed(states, [6, 6]))
    drafted(plain, slots)
    assert plain.scorer.confidence(tokens, 1) is None


def test_a_root_that_the_head_s_embeddings_lack_is_drafted_for(target: Target) -> None:
    """A target's logits may be padded: drafts are bad then, and nothing fails."""
    head = head_for(target, owns_embeddings=True, owns_output=True, vocab_size=VOCAB - 4, mask_token_id=5)
    drafter = bound(target, head)
    drafter.observe(committed(states_for(target, drafter), [6, 6]))
    slots = slots_of([[1] * 6 + [VOCAB - 1], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40)
    assert drafted(drafter, slots).tokens[:, 1:].max() < VOCAB - 4
