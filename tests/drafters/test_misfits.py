"""Arguments that make no drafter, files that contradict themselves, and heads that do not fit their target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from drafters import BlockDrafter, ChoiceDrafter, EagleDrafter, MergedDrafter, ModelDrafter, MTPDrafter, ReDrafter
from drafters.block_training import TrainedBlock
from drafters.heads.block_files import load_block, save_block
from drafters.heads.eagle import Eagle3Head
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.files import ServedFor
from drafters.heads.mtp import MTPHead, save_mtp
from drafters.hydra import HydraHeads, TrainedHydra
from drafters.medusa import MedusaDrafter, MedusaHeads
from drafters.ngram import NGramDrafter
from drafters.recycling import TokenRecyclingDrafter
from drafters.staged import StagedDrafter
from drafters.suffix import SuffixDrafter
from specdec import Sizes, Target
from specdec.drafting.builders import ExpansionTree
from tests.components import block_head, eagle_head, hydra_heads, markov_head, medusa_heads, recurrent_head
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers import LenientVerifier, RejectionVerifier

MODEL = tiny_model(vocab_size=16, layers=2)
BEST = ExpansionTree(4, 2, 4)
NEAR, LOOKUP, RULE = ModelDrafter(MODEL, 5), NGramDrafter(4, branches=1), RejectionVerifier()
MISTAKES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (NGramDrafter, (), {"max_ngram": 2, "min_ngram": 3}, "max_ngram=2 .* min_ngram=3"),
    (SuffixDrafter, (), {"mode": "graph"}, "mode='graph'"),
    (ModelDrafter, (MODEL, 2), {"sampling": "gumbel"}, "sampling='gumbel'"),
    (ChoiceDrafter, (NGramDrafter(), SuffixDrafter()), {}, "lookup is a NGramDrafter"),
    (MergedDrafter, (ModelDrafter(MODEL, 2), NGramDrafter()), {}, "lookup=ModelDrafter"),
    (MedusaDrafter, (medusa_heads(MODEL), 4), {}, "4 deep and there are 3 Medusa heads"),
    (TrainedHydra, (), {"dropout": 0.1}, r"head\.dropout=0\.1"),
    (ReDrafter, (recurrent_head(MODEL),), {"sampling": "iid"}, "sampling=iid"),
    (EagleDrafter, ("there",), {}, r"EagleDrafter\.from_pretrained"),
    (BlockDrafter, (block_head(MODEL), 4), {}, "4 deep and a block of 4 places predicts 3 tokens"),
    (BlockDrafter, (block_head(MODEL), BEST), {"sampling": "iid"}, "ExpansionTree cannot be drawn"),
    (BlockDrafter, (block_head(MODEL),), {"passes": 2}, "passes=2: only xPress's heads"),
    (BlockDrafter, (block_head(MODEL, xpress_rank=4),), {"block_size": 6}, "block_size=6: the head mixes 4 places"),
    (block_head, (MODEL,), {"xpress_rank": 4, "selector_rank": 4}, "not several"),
    (TrainedBlock, (), {"config": {"markov_rank": "abc"}}, r"head\.config\.markov_rank='abc'"),
    (MTPHead.for_target, (tiny_model("gpt2", vocab_size=16),), {}, "gpt2"),
    (StagedDrafter, (LOOKUP, LOOKUP, RULE), {}, "model is a NGramDrafter: give a drafter with a causal LM"),
    (StagedDrafter, (ModelDrafter(MODEL, 2, temperature=0), LOOKUP, RULE), {}, "does not draw token by token: give"),
    (StagedDrafter, (NEAR, LOOKUP, LenientVerifier()), {}, "rule=LenientVerifier: the chain would not"),
]


@pytest.mark.parametrize(("make", "given", "named", "words"), MISTAKES)
def test_it_is_refused_by_name(make: Callable[..., Any], given, named: dict[str, Any], words: str) -> None:
    with shapes_unchecked(), pytest.raises(ValueError, match=words):  # as for a user, whose types nothing checks
        make(*given, **named)


VOCAB = 64
IDS = torch.arange(0, VOCAB, 2)
SIZES = Sizes(max_batch_size=1, max_length=32)


def eagle3(model: PreTrainedModel, **options: Any) -> Eagle3Head:
    return Eagle3Head.for_target(model, **{"hidden_layers": (0, 1, -1), "draft_ids": IDS.tolist()} | options)


def block(model: PreTrainedModel, folder: Path, layout: str, **options: Any) -> None:
    head = block_head(model, mask_token_id=VOCAB - 1, **options)
    save_block(head, folder, layout=layout, served=ServedFor(target="some/target"))


SAVED: dict[str, tuple[Callable[[PreTrainedModel, Path], object], Callable[..., object]]] = {
    "eagle": (lambda model, folder: save_eagle(eagle_head(model), folder), EagleDrafter.from_pretrained),
    "eagle3": (lambda model, folder: save_eagle(eagle3(model), folder), EagleDrafter.from_pretrained),
    "own": (lambda model, folder: block(model, folder, "own", draft_ids=IDS), BlockDrafter.from_pretrained),
    "z-lab": (lambda model, folder: block(model, folder, "z-lab"), load_block),
    "speculators": (lambda model, folder: block(model, folder, "speculators", draft_ids=IDS), load_block),
    "medusa": (lambda model, folder: medusa_heads(model).save_pretrained(folder), MedusaHeads.from_pretrained),
    "hydra": (lambda model, folder: hydra_heads(model).save_pretrained(folder), HydraHeads.from_pretrained),
    "hydra++": (
        lambda model, folder: hydra_heads(model, prefix=True).save_pretrained(folder), HydraHeads.from_pretrained
    ),
}  # fmt: skip


def without(*names: str) -> Callable[..., object]:
    return lambda c, t: [t.pop(name) for name in names]


def has(name: str, *shape: int) -> Callable[..., object]:
    """Adds a tensor, or gives it another shape."""
    return lambda c, t: t.update({name: torch.zeros(*shape)})


def says(**settings: Any) -> Callable[..., object]:
    return lambda c, t: c.update(settings)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("eagle", without("layers.0.mlp.up_proj.weight"), r"layers\.0\.mlp\.up_proj\.weight"),
        ("eagle", has("layers.0.self_attn.o_proj.weight", 31, 32), r"o_proj\.weight .* 31, .*gate_proj"),
        ("eagle3", lambda c, t: [t.pop(name) for name in list(t) if name != "t2d"], "is no EAGLE head"),
        ("eagle3", without("lm_head.weight"), "32 tokens .* no lm_head.weight"),
        ("eagle3", has("midlayer.self_attn.kv_a_proj_with_mqa.weight", 4, 64), r"holds .*kv_a_proj_with_mqa"),
        ("eagle3", lambda c, t: t["d2t"].add_(torch.arange(len(t["d2t"]))), "d2t must hold differences"),
        ("eagle3", lambda c, t: t["fc.weight"].view(-1)[-1:].fill_(-torch.inf), r"fc\.weight holds NaN or infinity"),
        ("eagle3", says(head_dim=7), "correct head_dim"),
        ("eagle3", says(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3]}), r"where 2 are named"),
        ("eagle3", says(rope_parameters={"rope_type": "odd", "rope_theta": 1e4}), "rope_type .odd."),
        ("z-lab", lambda c, t: c["dflash_config"].update(mask_token_id=64), "mask token 64 .* 64 tokens"),
        ("z-lab", lambda c, t: c["dflash_config"].update(target_layer_ids=[0, 1, 2]), "3 hidden states"),
        ("z-lab", lambda c, t: [c.pop("block_size", 0), c["dflash_config"].pop("block_size", 0)], "block_size"),
        ("z-lab", lambda c, t: [c.pop("dflash_config"), c.update(architectures=["Llama"])], "is no block drafter"),
        ("speculators", lambda c, t: c.pop("aux_hidden_state_layer_ids"), "give hidden_layers"),
        ("medusa", without("0.1.weight", "2.1.weight"), r"0\.1\.weight, 2\.1\.weight are missing"),
        ("medusa", has("blocks.0.layers.0.weight", 4, 4), r"holds the tensors 0\.0\.linear\.bias"),
        ("hydra", has("prefix_embeding_layer.norm.weight", 1), r"hydra_lm_head\.0\.1\.weight is missing"),
        ("hydra++", says(hidden_state_offset=1), "hidden_state_offset"),
    ],
)
def test_files_that_contradict_themselves(model, kind: str, change, words: str, tmp_path: Path) -> None:
    save, load = SAVED[kind]
    save(model, tmp_path)
    (tmp_path / "specdec.json").unlink(missing_ok=True)  # what only this project's files say comes first
    (file,) = tmp_path.glob("*.safetensors")
    config, tensors = tmp_path / "config.json", load_file(file)
    stored = json.loads(config.read_text()) if config.exists() else {}
    change(stored, tensors)
    config.write_text(json.dumps(stored))
    save_file(tensors, file)
    with shapes_unchecked(), pytest.raises(ValueError, match=words) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "own", "z-lab", "speculators", "medusa", "hydra++"])
def test_a_key_that_nothing_reads_is_named(model, kind: str, tmp_path: Path, caplog) -> None:
    save, load = SAVED[kind]
    save(model, tmp_path)
    (tmp_path / "specdec.json").unlink(missing_ok=True)  # as of another training
    load(tmp_path)
    assert not caplog.records
    config = tmp_path / "config.json"
    unread = {"residual_multiplier": 0.22, "use_cache": False, "use_last_layernorm": True}
    config.write_text(json.dumps(json.loads(config.read_text()) | unread))
    load(tmp_path)
    said = f"{tmp_path}: its config.json has residual_multiplier, which nothing here reads"
    assert [record.message for record in caplog.records] == [said]


def test_a_folder_without_a_head(model: PreTrainedModel, tmp_path: Path) -> None:
    for file, content, words in (
        ("config.json", "{", r"config\.json is not JSON"),
        ("config.json", "[]", r"config\.json holds no settings by name"),
        ("config.json", None, r"there is no config\.json"),
        ("specdec.json", '{"hidden_layers": "abc"}', r"specdec\.json has hidden_layers='abc'"),
        ("model.safetensors", "no tensors", "cannot be read as a checkpoint"),
        ("model.safetensors", None, r"has no weights: .*model\.safetensors"),
    ):
        SAVED["eagle3"][0](model, tmp_path)
        (tmp_path / file).write_text(content or "")
        if content is None:
            (tmp_path / file).unlink()
        with shapes_unchecked(), pytest.raises(ValueError, match=words):  # annotations' check would refuse some, too
            load_eagle(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        load_eagle(tmp_path / "nowhere")
    torch.save([1, 2], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="is not a dict of tensors"):
        MedusaHeads.from_pretrained(tmp_path)


def test_a_target_that_does_not_fit_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    def sized(**sizes: int) -> PreTrainedModel:
        return type(model)(type(model.config)(**{**model.config.to_dict(), **sizes}))

    wider, fewer = sized(hidden_size=40, head_dim=8), tiny_model(vocab_size=24, layers=2)
    more, module = sized(vocab_size=VOCAB + 600), MTPHead.for_target(sized(hidden_size=16, head_dim=4))
    save_eagle(eagle_head(model), tmp_path / "eagle")
    save_mtp(module, tmp_path)  # files do not name the module's own target
    cases: list[tuple[Any, PreTrainedModel, str]] = [
        (EagleDrafter(eagle3(model), 2, name="H"), wider, "the head H reads .* width 32 and those .* have 40"),
        (EagleDrafter(eagle3(model), 2), fewer, "token 62 .* 24 tokens"),
        (EagleDrafter(eagle3(model, draft_ids=None), 2), more, "output layer .* 64 tokens .* 664"),
        (MedusaDrafter(medusa_heads(model), 2), fewer, "64 tokens and the target .* 24"),
        (MTPDrafter(module, 2), model, "width 16 and those of the target .* have 32"),
        (BlockDrafter(markov_head(model)), more, "64 tokens and the target .* 664"),
        (BlockDrafter(block_head(MODEL), hidden_layers=(4,)), MODEL, "the input of layer 4"),
        (BlockDrafter(block_head(MODEL, target_layers=9)), MODEL, "9 layers"),
        (BlockDrafter(block_head(MODEL, hidden_size=16)), MODEL, "16 wide"),
        (TokenRecyclingDrafter([17]), MODEL, "17 most probable tokens of a vocabulary of 16"),
        (EagleDrafter.from_pretrained(tmp_path / "eagle"), more, "64 tokens and the target .* has 664"),
        (MTPDrafter.from_pretrained(), MODEL, "not loaded from files"),
        (MTPDrafter.from_pretrained(tmp_path), model, "16 wide .* 32 wide"),
    ]
    for drafter, target, words in cases:
        with pytest.raises(ValueError, match=words):
            drafter.bind(Target(target), SIZES)
