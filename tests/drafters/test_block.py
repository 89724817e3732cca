"""Block drafters: the head against its definition, and trees over what it says."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from drafters.block import BlockDrafter
from drafters.block_training import TrainedBlock
from drafters.heads.block import BlockHead
from specdec import Batch, DraftSampling, ModelRunner, Outcome, SamplingParams, Sizes, Target, Topology
from specdec.drafting.scored import ScoredSession
from specdec.forward import LOGITS, ForwardBatch, Wants
from tests.drafters import pairs
from tests.forwards import drafted, inner_paths, outcome_of, slots_of

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
    """One place, one tap and one channel after the other; ``added`` is ``[place, tap, group]``."""
    out, size = torch.zeros_like(x), x.shape[1] // added.shape[2]
    for place in range(len(x)):
        for tap in range(min(len(base), place + 1)):
            for channel in range(x.shape[1]):
                kernel = base[tap, channel] + added[place, tap, channel // size]
                out[place, channel] += kernel * x[place - tap, channel]
    return out


def _around(x: Tensor, part: dict[str, Tensor], conv: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """A sublayer between its two convolutions, if it has any."""
    base = part.get(f"{conv}.base_kernel")
    if base is None:
        return sublayer(x)
    added = (x @ part[f"{conv}.kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1)
    return _convolved(sublayer(_convolved(x, base[0], added[:, 0])), base[1], added[:, 1])


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
    context = pairs.norm(features.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = table[tokens] * config.input_embedding_scale
    hidden = x
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
            if config.causal_in_windows if slides and config.causal_in_windows is not None else causal:
                scores = scores.masked_fill(place > place[count:, None], -torch.inf)
            if slides:
                counted_from = torch.full((slots, 1), count) if config.window_from_root else place[count:, None]
                scores = scores.masked_fill(counted_from - place >= config.sliding_window, -torch.inf)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(groups, 1))
            return mixed.reshape(slots, -1) @ part["self_attn.o_proj.weight"].T

        mlp = partial(pairs.mlp, weights=pairs.under(part, "mlp."))
        x = x + _around(pairs.norm(x, part["input_layernorm.weight"], eps), part, "attention_conv", attended)
        x = x + _around(pairs.norm(x, part["post_attention_layernorm.weight"], eps), part, "mlp_conv", mlp)
        hidden = x
    logits = pairs.norm(hidden, weights["norm.weight"], eps) @ output.T * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


ROWS = (7, 0, 3)


def context_of(head: BlockHead, rows: tuple[int, ...] = ROWS) -> Tensor:
    return torch.randn(len(rows), max(rows), head.feature_width, generator=torch.Generator().manual_seed(1))


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
            tokens=None,
            embeds=head.get_input_embeddings()(tokens),
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
        ({"layer_kind": "llama", "layer_types": ["full_attention", "sliding_attention"], **WINDOW}, "grouped"),
        ({"layer_types": ["sliding_attention", "sliding_attention"], **WINDOW, "causal": True}, "eager"),
        (MIXED, "grouped"),
        ({"conv_kernel_size": 3, "conv_group_size": 8}, "grouped"),
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
    head = head.bound(target.model)
    runner = ModelRunner(head, max_batch_size=4, max_length=32, max_nodes=4, attention=attention, optimize=True)
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
        assert runner.executor.recordings.kept, "nothing was captured"


def test_passes_over_a_block_are_made_before_anything_is_drafted(target: Target) -> None:
    """A chain is what the last pass says. Enough passes end where drawing place by place does."""
    found = {}
    for passes in (0, 1, 4, None):
        drafter = bound(target, head_for(target, xpress_rank=6, num_jacobi_passes=1), passes=passes)
        drafter.observe(committed(states_for(drafter)))
        found[passes] = drafted(drafter, rows()).tokens.tolist()
    assert found[0] == found[4] != found[1] == found[None]
    with pytest.raises(ValueError, match="passes=2: only xPress's heads"):
        bound(target, head_for(target), passes=2)
    with pytest.raises(ValueError, match="block_size=6: the head mixes 5 places"):
        bound(target, head_for(target, xpress_rank=6), block_size=6)
    with pytest.raises(ValueError, match="not several"):
        head_for(target, xpress_rank=6, selector_rank=6)
    with pytest.raises(ValueError, match=r"head\.config\.markov_rank='abc'"):
        TrainedBlock(config={"markov_rank": "abc"})


def bound(target: Target, head: BlockHead, tree: Any = None, **options: Any) -> ScoredSession:
    return BlockDrafter(head, tree, **options).bind(target, Sizes(max_batch_size=3, max_length=40))


def committed(states: dict[int, Tensor]) -> Outcome:
    return outcome_of(torch.full((2, 6), 7), [6, 6], hidden_states=states)


def states_for(drafter: ScoredSession) -> dict[int, Tensor]:
    """Hidden states of two rows of six tokens."""
    generator = torch.Generator().manual_seed(4)
    return {layer: torch.randn(2, 6, HIDDEN, generator=generator) for layer in drafter.hidden_layers}


def rows(first: int = 8, **options: Any) -> Batch:
    """The two rows, with their roots."""
    return slots_of([[1] * 6 + [first], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40, **options)


SHIFTED = {"shifted": True, "markov_rank": 6}
PLACES: dict[str, dict[str, Any]] = {
    "plain": {}, "shifted": {"shifted": True},
    "vanilla": SHIFTED, "gated": SHIFTED | {"markov_head_type": "gated"}, "rnn": SHIFTED | {"markov_head_type": "rnn"},
    "selector": {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 8},
    "domino": {"shifted": True, "gru_hidden_dim": 5, "emb_dim": 6, "pure_draft_prefix_len": 1},
    "domino_in_place": {"gru_hidden_dim": 5, "emb_dim": 6},
    "refiner": {"xpress_rank": 6}, "refiner_shifted": {"xpress_rank": 6, "shifted": True},
}  # fmt: skip
"""Heads, most of whose places depend on the tokens before them."""


@pytest.mark.parametrize("kind", PLACES)
def test_q_is_conditioned_on_the_branch(target: Target, kind: str) -> None:
    """Every node's q: the slot's logits, changed by the tokens above the node where the head reads them."""
    head = head_for(target, **PLACES[kind])
    shape = [(0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0)]
    passes = {"passes": 0} if head.config.xpress_rank else {}
    drafter = bound(target, head, shape, sampling="without_replacement", **passes)
    states = states_for(drafter)
    drafter.observe(committed(states))
    tree = drafted(drafter, rows(params=[SamplingParams(temperature=1.0)] * 2))
    assert (tree.law == int(DraftSampling.WITHOUT_REPLACEMENT)).all()
    bound_head = head.bound(target.model)
    for row in range(2):
        features = torch.cat([states[layer][row] for layer in drafter.hidden_layers], dim=-1)[None]
        cache = DynamicCache()
        with torch.no_grad():
            bound_head(features=features, past_key_values=cache)
            tokens = torch.tensor([[8 + row, *[VOCAB - 1] * 4]])
            output = bound_head(
                inputs_embeds=bound_head.embed_tokens(tokens), attention_mask=torch.zeros(1, 1, 5, 11),
                past_key_values=cache, output_hidden_states=True,
            )  # fmt: skip
            places, count = bound_head.place_head, head.config.tokens
            logits = output.logits[:, -count:]
            known, first = logits, None
            if places is not None:
                known, first = places.prepare(output.hidden_states[-1], count, torch.tensor([7]))
            for node, path in inner_paths(tree, row).items():
                state, found = first, logits[:, len(path) - 1]
                for place, token in enumerate([] if places is None else path):
                    above = {"hidden": known[:, place], "state": state}
                    above["embeds"] = bound_head.embed_tokens(torch.tensor([token]))
                    found, state = places(logits[:, place], torch.tensor([token]), place, **above)
                wanted = found[0].softmax(-1)
                torch.testing.assert_close(tree.draft_probs[row, node], wanted, atol=1e-4, rtol=1e-3)


def test_confidence_is_known_before_a_token_is_drawn(target: Target) -> None:
    head = head_for(target, shifted=True, markov_rank=6, confidence=True)
    drafter = bound(target, head, [2, 1])
    states = states_for(drafter)
    drafter.observe(committed(states))
    slots = rows()
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
    plain.observe(committed(states))
    drafted(plain, slots)
    assert plain.scorer.confidence(tokens, 1) is None
