"""Every head's training forward against a slow one: draft by draft, and for EAGLE-3 step by step, as it is served."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.block_training import TrainedBlock, packed_blocks
from drafters.eagle import TrainedEagle3
from drafters.heads.base import FeatureHead
from drafters.heads.block_parts import Refinement
from drafters.heads.mtp import MTPHead
from drafters.heads.parallel import Masked, dropped
from drafters.heads.training import Anchors, Prediction, TextBatch, TrainedHead
from drafters.heads.unrolled import TrainedFeatureHead
from drafters.medusa import TrainedMedusa
from drafters.model import TrainedLM, copy_weights
from drafters.mtp import TrainedMTP
from drafters.pard import TrainedPARD
from drafters.peagle import TrainedPEagle
from experiments.training.comparison import Comparison
from experiments.training.losses import CrossEntropy
from experiments.training.states import FrozenTarget
from experiments.training.weights import Power
from specdec.target.target import Target
from tests.architectures import tiny
from tests.drafters.test_block import behind
from tests.experiments.conftest import VOCAB_SIZE
from tests.models import ARCHITECTURES, tiny_model

LENGTH = 14
FULL = pytest.mark.full
LM = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def packed(*lengths: tuple[int, ...], supervised: float = 0.9) -> TextBatch:
    """Rows of documents of some lengths, with a hole in what is supervised."""
    generator = torch.Generator().manual_seed(3)
    lengths = lengths or ((14,), (6, 5), (8, 4))
    shape = (len(lengths), LENGTH)
    tokens = torch.randint(VOCAB_SIZE, shape, generator=generator)
    documents, positions = torch.full(shape, -1), torch.arange(LENGTH).repeat(len(lengths), 1)
    for row, documents_of_row in enumerate(lengths):
        used = sum(documents_of_row)
        documents[row, :used] = torch.repeat_interleave(torch.tensor(documents_of_row))
        positions[row, :used] = torch.cat([torch.arange(length) for length in documents_of_row])
    return TextBatch(tokens, torch.rand(shape, generator=generator) < supervised, documents, positions)


def alone(batch: TextBatch, root: int) -> tuple[TextBatch, int]:
    """The document of an anchor as a batch of its own, and the root's position in it."""
    row, place = divmod(root, LENGTH)
    there = batch.documents[row] == batch.documents[row, place]
    parts = [part[row][there][None] for part in (batch.tokens, batch.supervised, batch.documents, batch.positions)]
    return TextBatch(*parts), int(batch.positions[row, place])


def logits(head: TrainedHead, batch: TextBatch, anchors: Anchors, states: list[Tensor]) -> Tensor:
    """All logits of all anchors, depth by depth, from a prediction's states."""
    previous = batch.tokens.flatten()[anchors.places(batch)]
    return torch.stack([head.logits(each, previous[:, d], d + 1) for d, each in enumerate(states)], 1)


def drafted(head: TrainedHead, batch: TextBatch, frozen: FrozenTarget, anchors: Anchors) -> Tensor:
    return logits(head, batch, anchors, head(batch, frozen(batch), anchors).states)


def check(found: Tensor, anchors: Anchors, slowly: Callable[[int], Tensor], *, least=20, atol=1e-4) -> None:
    """Compare the logits of every anchor's draft with those of the draft alone, as far as the text goes on."""
    compared = 0
    for row, root in enumerate(anchors.index.tolist()):
        if valid := int(anchors.valid[row].sum()):
            wanted = slowly(root)[:valid].to(found.dtype)
            torch.testing.assert_close(found[row, :valid], wanted, rtol=1e-4, atol=atol)
            compared += valid
    assert compared >= least


def begun(head: Any, target: Target, std: float | None = None) -> Any:
    """A head whose weights are the same each time; with ``std`` its matrices are as if they were trained."""
    torch.manual_seed(1)
    head.begin(target, torch.arange(VOCAB_SIZE))
    for parameter in head.parameters() if std else ():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=std)
    return head


def ready(head: Any, target: Target, std: float | None = None) -> tuple[Any, FrozenTarget, TextBatch, Anchors]:
    """A head that has begun, the frozen target, some text, and the head's anchors in it."""
    head, frozen, batch = begun(head, target, std), FrozenTarget(target, head.hidden_layers or ()), packed()
    return head, frozen, batch, head.anchors(batch, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ["qwen2_mixed_sliding", "qwen3_5_text", pytest.param("gpt2", marks=FULL)])
def test_packed_documents_do_not_see_each_other(architecture: str) -> None:
    """States and logits of packed documents are those of the documents alone; recurrent layers need them apart."""
    recurrent = architecture not in ARCHITECTURES
    model = (tiny if recurrent else tiny_model)(architecture, vocab_size=VOCAB_SIZE)
    target, layers = Target(model, name=architecture), (1, 2)
    frozen, batch = FrozenTarget(target, layers), packed()
    assert frozen.packs is not recurrent
    states = frozen(batch)
    for root in (0, 13, LENGTH + 2, LENGTH + 9, 2 * LENGTH + 11):
        own, at = alone(batch, root)
        single = frozen(own)
        for layer in (*layers, -1):
            one, packed_one = single.hidden[layer][0, at], states.hidden[layer].flatten(0, 1)[root]
            torch.testing.assert_close(packed_one, one, rtol=1e-4, atol=1e-4)
        wanted = target.model(own.tokens).logits[0, at]
        torch.testing.assert_close(states.logits(torch.tensor([root]))[0], wanted, rtol=1e-4, atol=1e-4)
    if recurrent:
        frozen.packs = True
        assert (frozen(batch).hidden[-1] - states.hidden[-1])[1, 6:11].abs().max() > 0.1, "the mask alone"


def unrolled_slowly(head: FeatureHead, batch: TextBatch, frozen: FrozenTarget, root: int, depths: int, target: Target):
    """The logits of one draft as the engine computes them: true pairs, then the head's own, in one causal sequence."""
    own, at = alone(batch, root)
    states = frozen(own)
    fusion = head.model.fusion
    if isinstance(head, MTPHead):  # a copy, because it holds the target's own norm
        fusion = copy.deepcopy(head.bound(target.model).model.fusion).to(head.dtype)
    hidden = [states.hidden[layer].to(head.dtype) for layer in head.hidden_layers or ()]
    features = fusion(torch.cat(hidden, -1))[:, :at]
    tokens = own.tokens[:, 1 : at + 1]
    embed = target.model.get_input_embeddings() if head.model.embed_tokens is None else head.model.embed_tokens
    output = target.model.get_output_embeddings() if head.lm_head is None else head.lm_head
    found = []
    for depth in range(depths):
        done = head.model(inputs_embeds=embed(tokens).to(head.dtype), features=features, output_hidden_states=True)
        found.append(output(done.hidden_states[-1][0, -1].to(output.weight.dtype)))
        if at + depth + 1 == own.tokens.shape[1]:
            break
        tokens = torch.cat([tokens, own.tokens[:, at + depth + 1, None]], 1)
        features = torch.cat([features, done.hidden_states[head.fed_back][:, -1:]], 1)
    return torch.stack(found)


EAGLE3: dict[str, Any] = {"depths": 4, "hidden_layers": [1, 2, 3]}
UNROLLED: dict[str, Callable[[], TrainedFeatureHead]] = {
    "eagle3": lambda: TrainedEagle3(**EAGLE3, layers=2, norm_each=True, feeds_normed=True, norm_before_residual=True),
    "mtp": lambda: TrainedMTP(depths=3, hidden_state="after_norm"),
    "eagle3_reduced": lambda: TrainedEagle3(**EAGLE3, draft_vocabulary=50),
    "mtp_before_norm": lambda: TrainedMTP(depths=3, hidden_state="before_norm"),
}


@pytest.mark.parametrize("name", [*list(UNROLLED)[:2], *(pytest.param(n, marks=FULL) for n in list(UNROLLED)[2:])])
def test_the_training_time_test_is_what_the_engine_runs(name: str, target: Target) -> None:
    """All steps of all drafts at once equal each draft run alone, step after step; so do the gradients."""
    head = begun(UNROLLED[name](), target)
    assert head.columns is None or head.columns.tolist() == list(range(VOCAB_SIZE - 50, VOCAB_SIZE))
    double = head.double()
    frozen, batch = FrozenTarget(target, head.hidden_layers), packed()
    anchors = Anchors.everywhere(batch, head.depths)
    mine = drafted(double, batch, frozen, anchors)
    slow = double.copied().requires_grad_(True)
    drafts = {root: unrolled_slowly(slow, batch, frozen, root, head.depths, target) for root in anchors.index.tolist()}
    check(mine, anchors, drafts.__getitem__, least=41, atol=1e-5)
    (mine.tanh() * anchors.valid[:, :, None]).sum().backward()
    valid = anchors.valid.sum(1).tolist()
    sum(alone[:count].tanh().sum() for alone, count in zip(drafts.values(), valid, strict=True)).backward()
    trained = dict(double.head.named_parameters())
    for key, parameter in slow.named_parameters():
        assert parameter.grad is not None, key
        found = trained[key].grad
        # The norms of transformers' layers compute in float32.
        assert (found - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), key


def block_slowly(head: Any, own: TextBatch, at: int, frozen: FrozenTarget, target: Target) -> Tensor:
    """A block as the papers define it, and what the tokens before a place add to it."""
    block, config, embed = head.head.eval(), head.head.config, target.model.get_input_embeddings()
    hidden, logits = behind(block, target, own.tokens[0, : at + 1].tolist())
    own_output, places = block.lm_head, block.place_head
    logits = logits if own_output is None else own_output(hidden)
    found = logits[-config.tokens :][: own.tokens.shape[1] - at].detach().clone()
    if places is not None:
        given, state = places.prepare(hidden[None], config.tokens, own.tokens[:, at - 1])
        more = {"whole": True} if config.selector_rank else {}
        for place in range(len(found)):
            token = own.tokens[:, at + place]
            note, state = places.note(token, place, given[:, place], state, embed(token))
            found[place] = places.read(found[[place]], note, **more)[0]
    return found


def masked_slowly(head: Any, own: TextBatch, at: int, frozen: FrozenTarget, target: Target) -> Tensor:
    """A draft's own document up to the root, and masks behind it."""
    masks = torch.full((1, head.depths - 1), 7)
    if isinstance(head, TrainedPARD):
        return head.head(torch.cat([own.tokens[:, : at + 1], masks], 1)).logits[0, at:]
    states = frozen(own)
    features = head.head.fuse([states.hidden[layer][:, :at] for layer in head.hidden_layers])
    fill = head.head.fuse([head.head.model.mask_hidden]).expand(1, head.depths - 1, -1)
    tokens = torch.cat([own.tokens[:, 1 : at + 1], masks], 1)
    return head.head(tokens, features=torch.cat([features, fill], 1)).logits[0, at - 1 :]


def model_slowly(head: Any, own: TextBatch, at: int, frozen: FrozenTarget, target: Target) -> Tensor:
    return head.head(own.tokens).logits[0, at : at + 1]


def medusa_slowly(head: Any, own: TextBatch, at: int, frozen: FrozenTarget, target: Target) -> Tensor:
    """The state before the root is what it reads."""
    return head.head(frozen(own).hidden[-1][0, at - 1 : at])[:, 0]


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 3}
SELECTOR = {"selector_rank": 6, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8}
GRU = {"gru_hidden_dim": 6, "emb_dim": 5}
BLOCKS: dict[str, dict] = {
    "dflash_causal": {"block_size": 5, "draft_vocabulary": 40, "config": {"causal": True}},
    "dspark": {"block_size": 4, "shifted": True, "config": {"markov_rank": 6, "confidence": True}},
    "dflash_mixed": {"block_size": 5, "config": WINDOWS | {"causal_in_windows": True}},
    "dflash2": {"block_size": 5, "base_weight": 1.0, "config": SELECTOR},
    "xpress": {"block_size": 5, "rounds": 2, "base_weight": 0.6, "draft_vocabulary": 40, "config": {"xpress_rank": 6}},
    "domino": {"block_size": 4, "shifted": True, "base_until": 0.5, "config": GRU | {"pure_draft_prefix_len": 1}},
    "domino_in_place": {"block_size": 5, "base_until": 0.5, "config": GRU},
    "dspark_rnn": {"block_size": 4, "shifted": True, "config": {"markov_rank": 6, "markov_head_type": "rnn"}},
    "dspark_gated": {"block_size": 4, "shifted": True, "config": {"markov_rank": 6, "markov_head_type": "gated"}},
}


def block_of(name: str) -> TrainedBlock:
    return TrainedBlock(anchors=4, layers=2, hidden_layers=[1, 3], mask_token_id=63, **BLOCKS[name])


RECURRENT = LM | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_key_value_heads": 2}
MASKED: dict[str, Callable[[], Any]] = {
    "peagle": lambda: TrainedPEagle(depths=4, layers=2, hidden_layers=[1, 2, 3], keeps=0.5, mask_token_id=7),
    "pard": lambda: TrainedPARD(config=LM, depths=4, keeps=0.5, mask_token_id=7),
}
PACKED: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    "medusa": (lambda: TrainedMedusa(depths=3), medusa_slowly),
    "lm": (lambda: TrainedLM(config=LM), model_slowly),
    "lm, recurrent": (lambda: TrainedLM(architecture="qwen3_5_text", config=RECURRENT), model_slowly),
    **{name: (make, masked_slowly) for name, make in MASKED.items()},
    **{name: (partial(block_of, name), block_slowly) for name in BLOCKS},
}
"""The head, and its draft computed alone."""
SELDOM = {"domino_in_place", "dspark_rnn", "dspark_gated"}


@pytest.mark.parametrize("name", [pytest.param(each, marks=FULL) if each in SELDOM else each for each in PACKED])
def test_packed_drafts_are_each_draft_alone(name: str, target: Target) -> None:
    make, slowly = PACKED[name]
    trained = 0.3 if name in BLOCKS or name == "medusa" else None
    head, frozen, batch, anchors = ready(make(), target, trained)
    mine = drafted(head, batch, frozen, anchors)
    check(mine, anchors, lambda root: slowly(head, *alone(batch, root), frozen, target))
    mine.tanh().mul(anchors.valid[:, :, None]).sum().backward()
    without = [name for name, each in head.named_parameters() if each.grad is None or not each.grad.any()]
    assert all("confidence" in name for name in without)


def test_a_mask_that_sees_another_draft_is_told(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: masks see those of all drafts of their row that are no deeper. In training, some are dropped."""
    head, frozen, batch, some = ready(MASKED["pard"](), target)
    anchors = head.eval().anchors(batch, torch.Generator())
    assert torch.equal(some.index, anchors.index) and 0 < some.valid[:, 1:].sum() < anchors.valid[:, 1:].sum()
    behind = Masked.behind

    def leaky(*arguments: Any, **more: Any) -> Masked:
        found = behind(*arguments, **more)
        length = batch.tokens.shape[1]
        found.seen[:, length:, length:] = torch.ones(found.masks, found.masks).tril().bool()
        return found

    monkeypatch.setattr(Masked, "behind", leaky)
    mine = drafted(head, batch, frozen, anchors)
    wanted = [masked_slowly(head, *alone(batch, root), frozen, target) for root in anchors.index.tolist()]
    far = (mine - torch.stack(wanted)).abs().amax(-1) * anchors.valid
    assert far[:, 0].max() < 1e-4 and far[:, 2].max() > 1e-2


def test_windows_of_a_block_head_are_of_all_layers_but_the_last(target: Target) -> None:
    config = begun(TrainedBlock(config={"sliding_window": 3}, layers=3), target).head.config
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config.sliding_window == 3


def test_a_refiner_is_trained_on_the_passes_that_it_makes(target: Target) -> None:
    """The further predictions are the slots' own logits, and those after one pass and after two."""
    head, frozen, batch, anchors = ready(block_of("xpress"), target, 0.3)
    flat, states = batch.tokens.flatten(), frozen(batch)
    terms = head(batch, states, anchors).terms
    assert [term.weight(0.7) for term in terms] == [0.6, 0.15, 0.15]
    base, *passes = [logits(head, batch, anchors, term.states) for term in terms]
    read = [states.hidden[layer] for layer in head.hidden_layers]
    whole = packed_blocks(head.head, target.model.get_input_embeddings(), read, batch, anchors)
    for count, found in enumerate(passes, 1):
        served = Refinement(head.head.refiner_head, count, head.head.draft_ids)
        wanted = served(base, whole, flat[anchors.index], flat[anchors.index - 1])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "progress", "weights"),
    [("domino", 0.25, (0.5, 0.5)), ("domino", 0.8, (1, 0)), ("dflash2", 0.3, (1, 1))],
)
def test_losses_of_all_predictions_are_added_by_their_weights(name, progress, weights, target) -> None:
    head, frozen, batch, anchors = ready(block_of(name), target, 0.5)
    states, totals = frozen(batch), torch.ones(head.depths)
    given = head(batch, states, anchors)

    def loss(prediction: Prediction) -> float:
        head.forward = lambda *inputs: prediction
        compare = Comparison(head, CrossEntropy(), Power(1.0), chunk=100)
        return float(compare(batch, states, anchors, totals, progress)[0].detach())

    alone = [loss(Prediction(part)) for part in (given.states, given.terms[0].states)]
    assert abs(alone[0] - alone[1]) > 0.1
    assert loss(given) == pytest.approx(sum(w * each for w, each in zip(weights, alone, strict=True)), rel=1e-5)


def test_sampled_anchors() -> None:
    """As many per row, those that are there first, each as likely as any other."""
    batch, generator = packed((14,), (2,), supervised=1.0), torch.Generator().manual_seed(0)
    every = Anchors.everywhere(batch, 2)
    assert every.index.tolist() == list(range(1, 13)), "a draft begins after a state, and before the last token"
    assert every.valid.tolist() == [[True, True]] * 11 + [[True, False]]
    seen = torch.zeros(14)
    for _ in range(1000):
        found = every.sampled(batch, 3, generator)
        assert len(found.index) == 6 and found.index.tolist() == sorted(found.index.tolist())
        assert found.valid[:3, 0].all() and not found.valid[3:].any()
        seen[found.index[:3]] += 1
    assert seen[0] == seen[13] == 0
    # Each of twelve is drawn with probability 1/4; four standard deviations (odds of 1 in 1,300 for any of them).
    assert (seen[1:13] - 250).abs().max() < 4 * (1000 * 0.25 * 0.75) ** 0.5


def test_drafts_are_dropped_from_depth_to_depth() -> None:
    """As many as the shares say, each draft as likely as any other, and none that was dropped comes back."""
    batch, generator = packed((14,), (14,), supervised=1.0), torch.Generator().manual_seed(0)
    every, seen = Anchors.everywhere(batch, 5, before=0), torch.zeros(13)
    for _ in range(800):
        found = dropped(every, batch, 0.5, 0.2, generator)
        rows = found.valid.view(2, 13, 5)
        assert rows.sum(1)[:, :4].tolist() == [[13, 6, 3, 2]] * 2, "13 · max(0.5 ** d, 0.2)"
        assert set(rows.sum(1)[:, 4].tolist()) <= {1, 2}, "one of two may be at the end of its document"
        assert not (found.valid[:, 1:] & ~found.valid[:, :-1]).any() and not (found.valid & ~every.valid).any()
        seen += rows[0, :, 1]
    # Each of the twelve that have two tokens behind them is kept with probability 1/2; four standard deviations.
    assert seen[12] == 0 and (seen[:12] - 400).abs().max() < 4 * (800 * 0.25) ** 0.5


def test_a_hybrid_begins_with_the_weights_that_fit() -> None:
    """Matrices are the other model's; of norms, which one is added to, the difference is."""
    source = tiny("llama", num_hidden_layers=2, intermediate_size=48)
    hybrid = tiny("qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    for name, weight in hybrid.named_parameters():
        if name.endswith("layernorm.weight"):
            weight.data.zero_()
    copy_weights(hybrid, source)
    mine, given = hybrid.state_dict(), source.state_dict()
    for name in ("embed_tokens", "layers.0.mlp.up_proj", "layers.1.self_attn.o_proj"):
        assert torch.equal(mine[f"model.{name}.weight"], given[f"model.{name}.weight"])
    norm, x = "layers.0.input_layernorm", torch.randn(3, 5, source.config.hidden_size)
    one, other = (model.get_submodule(f"model.{norm}")(x) for model in (hybrid, source))
    torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match=r"head\.copies: a llama has no weights of the names and shapes of a mamba"):
        copy_weights(tiny("mamba", hidden_size=16), source)
