"""Medusa heads: the checkpoint format, what is drafted from which hidden state, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.medusa import DEFAULT_SHAPE, MedusaDrafter
from drafters.medusa_heads import MedusaHeads
from specdec.drafting.builders import ExpansionTree
from specdec.engine.engine import Engine
from specdec.inflate import inflate
from specdec.modeling.target import Target
from specdec.requests import SamplingParams
from specdec.slots import Slots
from specdec.tree import TreeShape
from specdec.types import Committed, DraftSampling
from tests.forwards import slots_of
from tests.models import tiny_model
from verifiers import TargetWalkVerifier

HIDDEN, VOCAB = 32, 64


def random_heads(
    num_heads: int = 3, *, num_layers: int = 1, vocab_size: int = VOCAB, hidden: int = HIDDEN
) -> MedusaHeads:
    heads = MedusaHeads(
        num_heads=num_heads, hidden_size=hidden, vocab_size=vocab_size, num_layers=num_layers, base_model="some/base"
    )
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.eval()


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (5, 1), (3, 2), (2, 0)])
def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path, num_heads: int, num_layers: int) -> None:
    heads = random_heads(num_heads, num_layers=num_layers)
    heads.save_pretrained(tmp_path)
    loaded = MedusaHeads.from_pretrained(tmp_path)
    assert (loaded.num_heads, loaded.num_layers, loaded.hidden_size, loaded.vocab_size) == (
        num_heads, num_layers, HIDDEN, VOCAB,
    )  # fmt: skip
    assert loaded.base_model == "some/base"
    hidden = torch.randn(4, HIDDEN)
    assert torch.equal(loaded(hidden), heads(hidden))
    assert torch.equal(loaded(hidden, 1), heads(hidden)[:1])


def test_the_tensors_have_the_published_names_and_shapes(tmp_path: Path) -> None:
    random_heads(2, num_layers=2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    per_head = {
        "0.linear.weight": (HIDDEN, HIDDEN), "0.linear.bias": (HIDDEN,),
        "1.linear.weight": (HIDDEN, HIDDEN), "1.linear.bias": (HIDDEN,), "2.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    assert shapes == {f"{head}.{key}": shape for head in range(2) for key, shape in per_head.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_num_heads"] == 2 and config["medusa_num_layers"] == 2


def test_layers_of_a_head_share_their_block(tmp_path: Path) -> None:
    random_heads(1, num_layers=2).save_pretrained(tmp_path)
    head = MedusaHeads.from_pretrained(tmp_path).heads[0]
    assert head[0] is head[1]
    hidden = torch.randn(3, HIDDEN)
    block, output = head[0].linear, head[2]
    once = hidden + torch.nn.functional.silu(hidden @ block.weight.T + block.bias)
    twice = once + torch.nn.functional.silu(once @ block.weight.T + block.bias)
    torch.testing.assert_close(head(hidden), twice @ output.weight.T)


def test_where_files_come_from_is_told_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_heads().save_pretrained(tmp_path / "inner")
    asked = []

    def download(repository: str, name: str, *, subfolder: str | None, **options: object) -> str:
        asked.append((repository, name, subfolder, options["revision"], options["token"], options["local_files_only"]))
        return str(tmp_path / "inner" / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    drafter = MedusaDrafter.from_pretrained(
        "some/heads", revision="v2", token="secret", subfolder="inner", local_files_only=True
    )
    assert drafter.heads.num_heads == 3
    given = ("inner", "v2", "secret", True)
    assert asked == [("some/heads", name, *given) for name in ("medusa_lm_head.safetensors", "config.json")]


def test_a_subfolder_of_a_folder(tmp_path: Path) -> None:
    random_heads(2).save_pretrained(tmp_path / "inner")
    assert MedusaHeads.from_pretrained(tmp_path, subfolder="inner").num_heads == 2
    with pytest.raises(ValueError, match="no Medusa checkpoint in"):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_both_file_types_and_the_prefix_of_whole_models(tmp_path: Path, prefix: str, suffix: str) -> None:
    heads = random_heads()
    tensors = {prefix + key: tensor.clone().half() for key, tensor in heads.heads.state_dict().items()}
    if prefix:
        tensors["model.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    file = tmp_path / f"medusa_lm_head.{suffix}"
    torch.save(tensors, file) if suffix == "pt" else save_file(tensors, file)
    # As an uploaded config says it, wrongly.
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 4}))
    for path in (tmp_path, file):
        loaded = MedusaHeads.from_pretrained(path)
        assert (loaded.num_heads, loaded.num_layers) == (3, 1)
        assert loaded.heads[0][1].weight.dtype == torch.float16, "the checkpoint's own dtype"
        assert torch.equal(loaded.heads[2][1].weight, heads.heads[2][1].weight.half())
    assert MedusaHeads.from_pretrained(tmp_path, dtype=torch.float32).heads[0][1].weight.dtype == torch.float32


def states(**changes: Tensor | None) -> dict[str, Tensor]:
    """A two-headed, one-layered checkpoint with some tensors replaced, added or (None) left out."""
    tensors: dict[str, Tensor | None] = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(4, 4)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(4)
        tensors[f"{head}.1.weight"] = torch.zeros(8, 4)
    tensors |= {key.replace("_", "."): value for key, value in changes.items()}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


UNEQUAL_LAYERS = {
    **{f"0.{layer}.linear.weight": torch.full((4, 4), float(layer)) for layer in range(2)},
    **{f"0.{layer}.linear.bias": torch.zeros(4) for layer in range(2)},
    "0.2.weight": torch.zeros(8, 4),
}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (states() | {"blocks.0.layers.0.weight": torch.zeros(4, 4)}, "'blocks.0.layers.0.weight', which is not of the"),
        (states(**{"1_0_linear_bias": None}), "is incomplete: 2 heads of 1 layers need 4 block tensors"),
        (states(**{"1_1_weight": None}), "is incomplete.*and 2 output layers, found 4 and 1"),
        (states(**{"0_1_weight": None, "1_1_weight": None}), "'version 2'"),
        (states(**{"2_1_weight": torch.zeros(8, 4)}), "is incomplete"),
        (states(**{"1_1_weight": None, "1_2_weight": torch.zeros(8, 4)}), "is incomplete"),
        ({}, "is incomplete"),
        (states(**{"1_1_weight": torch.zeros(9, 4)}), "unequal widths"),
        (UNEQUAL_LAYERS, "layer 1 of head 0 differs from its layer 0"),
    ],
)
def test_tensors_of_another_format_are_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=message):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"medusa_lm_head.{suffix}").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        MedusaHeads.from_pretrained(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="is not a dict of tensors"):
        MedusaHeads.from_pretrained(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no Medusa checkpoint in .*expected medusa_lm_head.safetensors"):
        MedusaHeads.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        MedusaHeads.from_pretrained(tmp_path / "missing")


# ---------------------------------------------------------------- drafting


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB))


def bound(target: Target, shape: object = (2, 2), *, heads: MedusaHeads | None = None, batch: int = 3) -> MedusaDrafter:
    drafter = MedusaDrafter(heads or random_heads(), shape)  # type: ignore[arg-type]
    drafter.bind(target, max_batch_size=batch, max_length=50)
    return drafter


def running(batch: int = 3, *, max_depth: int = 10) -> Slots:
    return slots_of([[row + 10] for row in range(batch)], vocab_size=VOCAB, max_depth=max_depth, max_length=50)


def committed(hidden: Tensor, counts: list[int], *, slots: list[int] | None = None) -> Committed:
    batch, positions, _ = hidden.shape
    host_slots = np.arange(batch) if slots is None else np.array(slots)
    return Committed(
        slots=torch.from_numpy(host_slots),
        host_slots=host_slots,
        tokens=torch.zeros(batch, positions, dtype=torch.long),
        starts=np.zeros(batch, dtype=np.int64),
        counts=np.array(counts),
        next_tokens=torch.zeros(batch, dtype=torch.long),
        path=None,
        hidden_states={-1: hidden},
    )


def expected(heads: MedusaHeads, hidden: Tensor, shape: TreeShape) -> list[int]:
    """The drafted tokens from one hidden state, choice by choice."""
    tokens = []
    for path in shape.paths:
        ranking = heads.heads[len(path) - 1](hidden).argsort(descending=True)
        tokens.append(int(ranking[path[-1]]))
    return tokens


@torch.no_grad()
@pytest.mark.parametrize("shape", [3, [3, 2, 1], [(0,), (1,), (0, 0), (0, 3), (0, 3, 1)]])
def test_every_node_takes_its_rank_of_its_head(target: Target, shape: object) -> None:
    heads = random_heads()
    drafter = bound(target, shape, heads=heads)
    hidden = torch.randn(3, 4, HIDDEN)
    drafter.observe(committed(hidden, [4, 1, 2]))
    tree = drafter.propose(running())
    static = TreeShape.of(shape)  # type: ignore[arg-type]
    assert tree.tokens[:, 0].tolist() == [10, 11, 12]
    last = [hidden[0, 3], hidden[1, 0], hidden[2, 1]]
    assert tree.tokens[:, 1:].tolist() == [expected(heads, state, static) for state in last]
    assert tree.parents.tolist() == [list(static.parents)] * 3 and tree.valid.all()
    assert tree.draft_probs is None and (tree.law == int(DraftSampling.DETERMINISTIC)).all()
    assert (tree.max_depth, tree.max_children) == (static.max_depth, static.max_children)


@torch.no_grad()
def test_the_hidden_state_of_the_latest_commit_counts(target: Target) -> None:
    heads = random_heads()
    drafter = bound(target, 1, heads=heads)
    first, second = torch.randn(3, 2, HIDDEN), torch.randn(2, 3, HIDDEN)
    drafter.observe(committed(first, [2, 2, 2]))
    drafter.observe(committed(second, [3, 1], slots=[2, 0]))
    tokens = drafter.propose(running()).tokens[:, 1].tolist()
    states = [second[1, 0], first[1, 1], second[0, 2]]
    assert tokens == [int(heads.heads[0](state).argmax()) for state in states]


def test_rows_without_a_hidden_state_propose_nothing(target: Target) -> None:
    drafter = bound(target)
    assert drafter.propose(running()).width == 1
    drafter.observe(committed(torch.randn(1, 1, HIDDEN), [1], slots=[1]))
    tree = drafter.propose(running())
    assert tree.valid.tolist() == [[True] + [False] * 6, [True] * 7, [True] + [False] * 6]
    assert (tree.children[0] == -1).all() and tree.children[1, 0].tolist() == [1, 2]


def test_admission_forgets_the_slot_s_last_request(target: Target) -> None:
    drafter = bound(target, batch=1)
    drafter.observe(committed(torch.randn(1, 1, HIDDEN), [1]))
    assert drafter.propose(running(1)).width == 7
    drafter.admit(0, [1], SamplingParams())
    assert drafter.propose(running(1)).width == 1


def test_no_deeper_than_any_row_may_go(target: Target) -> None:
    drafter = bound(target, [2, 1, 1])
    drafter.observe(committed(torch.randn(3, 1, HIDDEN), [1, 1, 1]))
    slots = running(max_depth=1)
    assert drafter.propose(slots).width == 3
    slots.host_max_depth[1] = 2
    assert drafter.propose(slots).max_depth == 2
    slots.host_drafting[:] = False
    assert drafter.propose(slots).width == 1


def test_heads_that_know_fewer_tokens_than_the_target(target: Target) -> None:
    drafter = bound(target, [2], heads=random_heads(vocab_size=VOCAB - 4))
    drafter.observe(committed(torch.randn(3, 1, HIDDEN), [1, 1, 1]))
    assert drafter.propose(running()).tokens.max() < VOCAB


def test_heads_compute_in_the_target_s_dtype_unless_told(target: Target) -> None:
    heads = random_heads().to(torch.bfloat16)
    assert {parameter.dtype for parameter in bound(target, heads=heads)._bound.parameters()} == {torch.float32}
    drafter = MedusaDrafter(heads, 2, dtype="bfloat16")
    drafter.bind(target, max_batch_size=1, max_length=9)
    assert {parameter.dtype for parameter in drafter._bound.parameters()} == {torch.bfloat16}
    drafter.observe(committed(torch.randn(1, 1, HIDDEN), [1]))
    assert drafter.propose(running(1)).width == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_caller_s_heads_stay_as_they_are(target: Target, dtype: torch.dtype) -> None:
    """They may be in training, and a second target may want them in another dtype."""
    heads = random_heads().to(dtype).train()
    heads(torch.randn(1, HIDDEN, dtype=dtype)).sum().backward()
    before = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in heads.parameters()]
    drafter = bound(target, heads=heads)
    drafter.observe(committed(torch.randn(3, 1, HIDDEN), [1, 1, 1]))
    assert drafter.propose(running()).width > 1
    assert heads.training and all(module.training for module in heads.modules())
    for now, (parameter, value, gradient) in zip(heads.parameters(), before, strict=True):
        assert now is parameter and now.requires_grad and now.grad is gradient is not None
        assert now.dtype is dtype and torch.equal(now, value)
    assert all(p.grad is None and not p.requires_grad for p in drafter._bound.parameters())


def test_heads_that_fit_are_used_without_a_copy(target: Target) -> None:
    heads = random_heads().train()
    assert bound(target, heads=heads)._bound is heads
    assert heads.training and all(parameter.requires_grad for parameter in heads.parameters())


def test_what_it_tells_the_engine() -> None:
    drafter = MedusaDrafter(random_heads(), [(0,), (1,), (0, 0)])
    assert (drafter.max_nodes, drafter.max_depth, drafter.is_chain) == (3, 2, False)
    assert drafter.laws == {DraftSampling.DETERMINISTIC} and drafter.hidden_layers == (-1,)
    assert MedusaDrafter(random_heads(), 2).is_chain


@torch.no_grad()
@pytest.mark.parametrize("sampling", ["iid", "without_replacement"])
def test_a_sampled_head_s_q_is_its_softmax_at_the_request_s_temperature(target: Target, sampling: str) -> None:
    heads = random_heads()
    drafter = MedusaDrafter(heads, [2, 1], sampling=sampling)
    assert drafter.laws == {DraftSampling[sampling.upper()]} and drafter.has_leaf_probs
    drafter.bind(target, max_batch_size=3, max_length=50, leaf_probs=True)
    hidden = torch.randn(3, 1, HIDDEN)
    drafter.observe(committed(hidden, [1, 1, 1]))
    params = [SamplingParams(temperature=t) for t in (0.5, 1.0, 2.0)]
    tree = drafter.propose(slots_of([[10], [11], [12]], vocab_size=VOCAB, params=params, max_length=50))
    depths = [0, 1, 1, 2, 2]
    for row, temperature in enumerate((0.5, 1.0, 2.0)):
        for node, depth in enumerate(depths):  # leaves included
            wanted = (heads.heads[depth](hidden[row, 0]) / temperature).softmax(-1)
            torch.testing.assert_close(tree.draft_probs[row, node], wanted, atol=1e-5, rtol=1e-4)


def test_a_leaf_s_law_takes_one_more_head() -> None:
    assert MedusaDrafter(random_heads(3), 2, sampling="iid").has_leaf_probs
    assert not MedusaDrafter(random_heads(3), 3, sampling="iid").has_leaf_probs


@torch.no_grad()
def test_a_tree_of_the_best_paths_of_all(target: Target) -> None:
    heads = random_heads(2)
    drafter = MedusaDrafter(heads, ExpansionTree(9, 2, 9))
    drafter.bind(target, max_batch_size=3, max_length=50)
    hidden = torch.randn(3, 1, HIDDEN)
    drafter.observe(committed(hidden, [1, 1, 1]))
    tree = drafter.propose(running())
    for row in range(3):
        first, second = (head(hidden[row, 0]).log_softmax(-1) for head in heads.heads)
        scores = {(a,): float(first[a]) for a in range(VOCAB)}
        scores |= {(a, b): float(first[a] + second[b]) for a in range(VOCAB) for b in range(VOCAB)}
        found = set()
        for node in range(1, 10):
            parent, token = int(tree.parents[row, node]), int(tree.tokens[row, node])
            found.add((token,) if parent == 0 else (int(tree.tokens[row, parent]), token))
        assert found == set(sorted(scores, key=scores.__getitem__, reverse=True)[:9])


def test_a_row_that_is_not_ready_has_no_q_at_the_leaves(target: Target) -> None:
    drafter = MedusaDrafter(random_heads(), 2, sampling="iid")
    drafter.bind(target, max_batch_size=3, max_length=50, leaf_probs=True)
    drafter.observe(committed(torch.randn(1, 1, HIDDEN), [1], slots=[1]))
    params = [SamplingParams(temperature=1.0)] * 3
    tree = drafter.propose(slots_of([[10], [11], [12]], vocab_size=VOCAB, params=params, max_length=50))
    assert tree.valid[:, 1:].tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert not tree.draft_probs[[0, 2]].any() and tree.draft_probs[1].any()


def test_the_default_shape_is_as_deep_as_there_are_heads(tmp_path: Path) -> None:
    random_heads(5).save_pretrained(tmp_path)
    assert MedusaDrafter.from_pretrained(tmp_path).shape == DEFAULT_SHAPE
    assert MedusaDrafter(random_heads(2)).shape == DEFAULT_SHAPE.cut(2)
    assert MedusaDrafter.from_pretrained(tmp_path, shape=[2, 1]).shape == TreeShape.branching(2, 1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (4, "the tree shape is 4 deep and there are 3 Medusa heads"),
        ([VOCAB + 1], f"takes the {VOCAB + 1} most probable tokens of a vocabulary of {VOCAB}"),
    ],
)
def test_shapes_that_do_not_fit_the_heads(shape: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaDrafter(random_heads(), shape)  # type: ignore[arg-type]


def test_heads_that_do_not_fit_the_target(target: Target) -> None:
    with pytest.raises(ValueError, match=r"hidden states of width 16 and those of the target .* have 32"):
        bound(target, heads=random_heads(hidden=16))
    with pytest.raises(ValueError, match=f"have {VOCAB + 1} tokens and the target .* has {VOCAB}"):
        bound(target, heads=random_heads(vocab_size=VOCAB + 1))


def test_heads_on_an_inflated_target_draft_what_they_did() -> None:
    """Widened with the hidden states, whose new channels carry nothing."""
    model = tiny_model("llama_mqa_tied", scale=2.0)
    shape = {
        "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64,
    }  # fmt: skip
    heads = random_heads(2)
    for head in heads.heads:  # so that they say what the target says, more or less
        head[1].weight.data.copy_(model.get_output_embeddings().weight)
    sampling = SamplingParams(max_new_tokens=40)
    outputs = []
    for target in (Target(model), Target(inflate(model, shape))):
        engine = Engine(target, MedusaDrafter(heads, [16, 2]), TargetWalkVerifier(), max_length=64)
        outputs.append(engine.generate([[1, 2, 3]], sampling)[0])
    assert heads.hidden_size == 32, "the user's heads are left as they are"
    assert outputs[0].token_ids == outputs[1].token_ids
    assert [step.accepted for step in outputs[0].steps] == [step.accepted for step in outputs[1].steps]
    assert sum(step.accepted for step in outputs[0].steps) > 0
