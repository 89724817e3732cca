"""Block drafters: the head against a dense reference, trees over what it says, and what is refused."""

import heapq
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from drafters.block import BlockDrafter
from drafters.heads.block import BlockHead, default_layers
from drafters.heads.block_batch import block_batch
from drafters.heads.markov import MarkovHead
from specdec.batch import LOGITS, ForwardBatch, Wants
from specdec.drafting.builders import ExpansionTree
from specdec.engine.engine import Engine
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.requests import SamplingParams
from specdec.slots import Slots
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import Committed, DraftSampling
from tests.components import markov_head
from tests.forwards import slots_of
from tests.models import tiny_model
from tests.test_distribution import LEVEL, p_value
from verifiers.rejection import RejectionVerifier

VOCAB, HIDDEN = 64, 32


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=VOCAB))


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


# ---------------------------------------------------------------- the head against its definition


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
        if causal:
            scores = scores.masked_fill(place > place[count:, None], -torch.inf)
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
                host_slots=slots,
                host_lengths=np.full(3, start),
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
            host_slots=slots,
            host_lengths=lengths,
            wants=LOGITS,
        )
    )
    return output.scores


@pytest.mark.parametrize(
    ("settings", "attention"),
    [
        ({}, "grouped"),
        ({}, "eager"),
        ({}, "flex"),
        ({"causal": True}, "grouped"),
        ({"layer_kind": "llama"}, "grouped"),
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
    topology = Topology.chain(width, runner.device) if head.config.causal else Topology.block(width, runner.device)
    features = context_of(head)
    tokens = torch.full((3, width), VOCAB - 1)
    tokens[:, 0] = torch.tensor([5, 9, 11])
    wanted = [
        dense_logits(head, target, features[row, :length], tokens[row].tolist(), causal=head.config.causal)
        for row, length in enumerate(ROWS)
    ]
    for _ in range(2 if attention == "flex" else 30):  # more than it takes to be captured
        found = forward_block(runner, head, features, tokens, topology)
    for row in range(3):
        torch.testing.assert_close(found[row].double(), wanted[row], atol=2e-4, rtol=2e-4)
    if attention == "grouped":
        assert any(program is not None for program in runner.executor._programs.values()), "nothing was captured"


def test_the_reference_tells_both_ways_from_one_way(target: Target) -> None:
    head = head_for(target)
    features, tokens = context_of(head)[0], [5, 63, 63, 63, 63]
    both, one = (dense_logits(head, target, features, tokens, causal=causal) for causal in (False, True))
    assert (both[0] - one[0]).abs().max() > 0.01


def test_slots_that_see_each_other_keep_their_positions() -> None:
    block, chain = Topology.block(3, torch.device("cpu")), Topology.chain(3, torch.device("cpu"))
    assert block.ancestors.all() and block.both_ways and not block.in_line
    assert torch.equal(block.depth, chain.depth) and torch.equal(block.parents, chain.parents)
    assert block.first(2).ancestors.tolist() == [[[True, True], [True, True]]]
    assert block.ancestor_words.tolist() == [[[7], [7], [7]]]
    assert Topology.block(3, torch.device("cpu")) is block, "made once"
    assert not chain.ancestors.all(), "the chain is left as it is"


# ---------------------------------------------------------------- training's view


@torch.no_grad()
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_side_by_side_are_what_each_is_alone(target: Target, shifted: bool, causal: bool) -> None:
    """Several anchors of packed documents in one forward, against one block at a time."""
    head = head_for(target, shifted=shifted, causal=causal)
    bound = head.bound(target.model)
    texts = torch.randint(0, VOCAB - 1, (1, 12), generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0] * 7 + [1] * 5])
    positions = torch.tensor([[*range(7), *range(5)]])
    anchors = torch.tensor([[2, 5, 9]])
    features = torch.randn(1, 12, head.feature_width, generator=torch.Generator().manual_seed(3))
    batch = block_batch(texts, anchors, head.config, documents=documents, positions=positions)
    cache = DynamicCache()
    bound(features=features, position_ids=positions, past_key_values=cache)
    logits = bound(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=batch.mask, past_key_values=cache
    ).logits
    for number, (first, anchor) in enumerate([(0, 2), (0, 5), (7, 9)]):
        tokens = [int(texts[0, anchor]), *[VOCAB - 1] * 4]
        wanted = dense_logits(head, target, features[0, first:anchor], tokens, causal=causal)
        found = logits[0, number * 5 : number * 5 + 5]
        torch.testing.assert_close(found.double(), wanted, atol=2e-4, rtol=2e-4)
    row = texts[0].tolist()
    assert batch.columns.tolist() == [[*range(b + (not shifted), b + 5)] for b in (0, 5, 10)]
    last = {2: 7, 5: 7, 9: 12}
    for block, anchor in enumerate((2, 5, 9)):
        at = range(anchor + 1, anchor + 1 + head.config.tokens)
        assert batch.known[0, block].tolist() == [place < last[anchor] for place in at]
        assert batch.labels[0, block].tolist() == [row[place] if place < last[anchor] else 0 for place in at]
        known = [place for place in at if place <= last[anchor]]
        assert batch.previous[0, block, : len(known)].tolist() == [row[place - 1] for place in known]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_is_what_the_paper_defines(kind: str) -> None:
    torch.manual_seed(0)
    head = MarkovHead(kind, vocab_size=9, draft_vocab_size=7, hidden_size=6, rank=4).double()
    previous, hidden = torch.tensor([[3, 0, 8]]), torch.randn(1, 3, 6).double()
    found = head.along(previous, hidden)
    weights, state = {name: tensor.numpy() for name, tensor in head.state_dict().items()}, np.zeros(4)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    for slot in range(3):
        known, h = weights["markov_w1.weight"][previous[0, slot]], hidden[0, slot].numpy()
        if kind == "gated":
            gate = weights["gate_proj.weight"] @ np.concatenate([h, known]) + weights["gate_proj.bias"]
            known = sigmoid(gate) * known
        if kind == "rnn":
            joint = weights["joint_proj.weight"] @ np.concatenate([state, known, h]) + weights["joint_proj.bias"]
            g, c, o = joint[:4], joint[4:8], joint[8:]
            state, known = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c), np.tanh(o)
        np.testing.assert_allclose(found[0, slot].numpy(), weights["markov_w2.weight"] @ known, atol=1e-12)


# ---------------------------------------------------------------- drafting


def bound(target: Target, head: BlockHead, tree: Any = None, **options: Any) -> BlockDrafter:
    drafter = BlockDrafter(head, tree, **options)
    drafter.bind(target, max_batch_size=3, max_length=40)
    return drafter


def committed(states: dict[int, Tensor], counts: list[int]) -> Committed:
    batch, positions, _ = next(iter(states.values())).shape
    return Committed(
        slots=torch.arange(batch),
        host_slots=np.arange(batch),
        tokens=torch.zeros(batch, positions, dtype=torch.long),
        starts=np.zeros(batch, dtype=np.int64),
        counts=np.array(counts),
        next_tokens=torch.zeros(batch, dtype=torch.long),
        path=None,
        hidden_states=states,
    )


def states_for(target: Target, drafter: BlockDrafter, rows: int = 2, positions: int = 6) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {layer: torch.randn(rows, positions, HIDDEN, generator=generator) for layer in drafter.hidden_layers}


def reference_for(target: Target, drafter: BlockDrafter, states: dict[int, Tensor], row: int, root: int) -> Tensor:
    """Logits of depth 1, 2, … in a row, of a head without a Markov head."""
    features = torch.cat([states[layer][row] for layer in drafter.hidden_layers], dim=-1)
    tokens = [root, *[VOCAB - 1] * (drafter.block_size - 1)]
    logits = dense_logits(drafter.head, target, features, tokens, causal=drafter.head.config.causal)
    return logits if drafter.head.config.shifted else logits[1:]


@pytest.mark.parametrize("shifted", [False, True])
def test_a_greedy_chain_takes_the_slots_best_tokens(target: Target, shifted: bool) -> None:
    drafter = bound(target, head_for(target, shifted=shifted))
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    tree = drafter.propose(slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40))
    for row, root in enumerate((8, 9)):
        wanted = reference_for(target, drafter, states, row, root).argmax(-1)
        assert tree.tokens[row].tolist() == [root, *wanted.tolist()]
    assert tree.max_depth == (5 if shifted else 4)


def best_first(log_probs: np.ndarray, nodes: int) -> set[tuple[int, ...]]:
    """DDTree by a heap over rank tuples, as its paper has it: the most probable paths, as tuples of tokens."""
    depth, vocab = log_probs.shape
    order = np.argsort(-log_probs, axis=1, kind="stable")
    value = lambda ranks: sum(log_probs[d, order[d, r]] for d, r in enumerate(ranks))  # noqa: E731
    heap, found = [(-value((0,)), (0,))], set()
    while len(found) < nodes:
        _, ranks = heapq.heappop(heap)
        found.add(tuple(int(order[d, r]) for d, r in enumerate(ranks)))
        if ranks[-1] + 1 < vocab:
            sibling = (*ranks[:-1], ranks[-1] + 1)
            heapq.heappush(heap, (-value(sibling), sibling))
        if len(ranks) < depth:
            heapq.heappush(heap, (-value((*ranks, 0)), (*ranks, 0)))
    return found


def paths_of(tree: Any, row: int) -> set[tuple[int, ...]]:
    found = set()
    for node in range(1, tree.width):
        path, at = [], node
        while at > 0:
            path.append(int(tree.tokens[row, at]))
            at = int(tree.parents[row, at])
        if tree.valid[row, node]:
            found.add(tuple(path[::-1]))
    return found


@pytest.mark.parametrize("nodes", [1, 7, 24])
def test_trees_over_marginals_hold_the_best_paths_of_all(target: Target, nodes: int) -> None:
    """DDTree: the same nodes as best-first search, and as enumerating all paths of two levels."""
    drafter = bound(target, head_for(target), ExpansionTree(nodes, 4, nodes))
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    tree = drafter.propose(slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40))
    for row, root in enumerate((8, 9)):
        log_probs = reference_for(target, drafter, states, row, root).log_softmax(-1).numpy()
        assert paths_of(tree, row) == best_first(log_probs, nodes)
        pairs = {(a, b): log_probs[0, a] + log_probs[1, b] for a, b in itertools.product(range(VOCAB), repeat=2)}
        kept = {path for path in paths_of(tree, row) if len(path) == 2}
        worst = min((pairs[path] for path in kept), default=np.inf)
        assert all(value <= worst + 1e-6 for path, value in pairs.items() if path not in kept)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("shape", [4, [2, 2, 1], [(0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0)]])
def test_q_is_conditioned_on_the_branch(target: Target, kind: str, shape: Any) -> None:
    """Every node's q: the slot's logits and what the tokens above the node add to them."""
    head = head_for(target, shifted=True, markov_rank=6, markov_head_type=kind)
    drafter = bound(target, head, shape, sampling="without_replacement")
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    params = [SamplingParams(temperature=1.0)] * 2
    tree = drafter.propose(slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, params=params, max_length=40))
    assert (tree.law == int(DraftSampling.WITHOUT_REPLACEMENT)).all()
    double = head.markov_head.double()
    bound_head = head.bound(target.model)
    for row in range(2):
        features = torch.cat([states[layer][row] for layer in drafter.hidden_layers], dim=-1)[None]
        cache = DynamicCache()
        with torch.no_grad():
            bound_head.float()(features=features, past_key_values=cache)
            tokens = torch.tensor([[8 + row, *[VOCAB - 1] * 4]])
            output = bound_head(
                input_ids=tokens, attention_mask=torch.zeros(1, 1, 5, 11), past_key_values=cache,
                output_hidden_states=True,
            )  # fmt: skip
            double.double()
            parents = tree.parents[row].tolist()
            for node in {parent for parent in parents if parent >= 0}:
                path, at = [], node
                while at >= 0:
                    path.append(int(tree.tokens[row, at]))
                    at = parents[at]
                depth = len(path)
                hidden = output.hidden_states[-1][:, :depth].double()
                bias = double.along(torch.tensor([path[::-1]]), hidden)[0, -1]
                wanted = (output.logits[0, depth - 1].double() + bias).softmax(-1)
                torch.testing.assert_close(tree.draft_probs[row, node].double(), wanted, atol=1e-4, rtol=1e-3)
        double.float()


def test_confidence_is_known_before_a_token_is_drawn(target: Target) -> None:
    head = head_for(target, shifted=True, markov_rank=6, confidence=True)
    drafter = bound(target, head, [2, 1])
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    slots = slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40)
    drafter.propose(slots)
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
    plain.propose(slots)
    assert plain.scorer.confidence(tokens, 1) is None


@pytest.mark.parametrize("recording", ["off", "rounds"])
def test_the_context_is_what_one_forward_of_the_whole_text_gives(recording: str) -> None:
    """After rounds that accepted more and less, in chunks and in slots that were used before."""
    model = tiny_model("llama", vocab_size=VOCAB)
    head = markov_head(model)
    drafter = BlockDrafter(head, [2, 1, 1])
    engine = Engine(
        Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=48, prefill_chunk=5,
        recording=recording,
    )  # fmt: skip
    prompts = [[3] * 9, [7, 8, 9], [11], [5, 6] * 6]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0.5))
    assert sum(step.accepted for output in outputs for step in output.steps) > 10
    stream = engine.stream([[3, 4] * 4, [9] * 3], SamplingParams(max_new_tokens=24, temperature=0.5))
    tokens: dict[int, list[int]] = {}
    for step in itertools.islice(stream, 12):
        tokens.setdefault(step.request, []).extend(step.token_ids)
    cache, bound_head = drafter.runner.cache, head.bound(model)
    first = min(tokens)
    for slot, prompt in enumerate([[3, 4] * 4, [9] * 3]):
        text = prompt + tokens[first + slot]
        with torch.no_grad():
            states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            fresh = bound_head(features=states[1]).past_key_values
        keys, values = (tensor[0, slot, : len(text) - 1].transpose(0, 1) for tensor in cache.tensors)
        torch.testing.assert_close(keys, fresh.layers[0].keys[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, fresh.layers[0].values[0], atol=1e-4, rtol=1e-4)


class SaysTheMarginals(BlockDrafter):
    """Mutant: draws with the Markov head, and says q without it."""

    def propose(self, slots: Slots) -> DraftTree:
        tree = super().propose(slots)
        if tree.draft_probs is not None:
            depth = tree.width - 1
            tree.draft_probs[:, :depth] = self.scorer._logits[:, :depth].softmax(-1)  # type: ignore[attr-defined]
        return tree


def test_q_without_the_markov_head_s_part_is_rejected() -> None:
    model = tiny_model("llama", vocab_size=5, scale=1.5, layers=2)
    drafter = SaysTheMarginals(markov_head(model), 3)
    assert p_value(model, drafter, RejectionVerifier(), SamplingParams(temperature=1.0)) < LEVEL


def test_a_reduced_vocabulary_drafts_the_target_s_ids(target: Target) -> None:
    ids = torch.arange(3, VOCAB, 4)
    drafter = bound(target, head_for(target, draft_ids=ids), [3, 1])
    drafter.observe(committed(states_for(target, drafter), [6, 6]))
    tree = drafter.propose(slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40))
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= set(ids.tolist())


def test_the_head_in_training_is_the_one_that_drafts(target: Target) -> None:
    head = head_for(target)
    drafter = bound(target, head)
    drafter.observe(committed(states_for(target, drafter), [6, 6]))
    slots = slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40)
    before = drafter.propose(slots).tokens.clone()
    with torch.no_grad():
        head.layers[1].mlp.down_proj.weight.neg_()
    assert not torch.equal(drafter.propose(slots).tokens, before)
    assert all(parameter.requires_grad for parameter in head.parameters())


def test_the_usual_layers() -> None:
    assert default_layers(36, 5) == [1, 9, 17, 25, 33]
    assert default_layers(28, 1) == [14]


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"tree": 5}, "the tree is 5 deep and a block of 5 slots predicts 4 tokens"),
        ({"shifted": True}, {"tree": 6}, "the tree is 6 deep and a block of 5 slots predicts 5 tokens"),
        ({}, {"block_size": 1}, "block_size=1"),
        ({}, {"mask_token_id": VOCAB}, f"mask token {VOCAB}, and the embeddings have {VOCAB} rows"),
        ({}, {"hidden_layers": (1, 4)}, r"reads the hidden states \[1, 4\] and the target .* 0 to 3"),
        ({}, {"hidden_layers": (1, 2, 3)}, "reads 64 channels per position, and 3 hidden states .* have 96"),
        ({"target_layers": 9}, {}, "was trained on a target of 9 layers, and .* has 4"),
        ({"target_hidden_size": 16}, {}, "reads 32 channels per position, and 2 hidden states .* have 64"),
        ({"hidden_size": 16}, {}, "is 16 wide and borrows"),
        ({"sampling": None}, {"tree": ExpansionTree(4, 2, 4), "sampling": "iid"}, "most probable paths"),
    ],
)
def test_what_does_not_fit_is_refused(
    target: Target, settings: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    settings.pop("sampling", None)
    with pytest.raises(ValueError, match=message):
        bound(target, head_for(target, **settings), **options)
