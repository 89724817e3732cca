"""Exported drafters: they draft as before in every format, and say what vLLM, speculators and SGLang ask; refusals."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters import BlockDrafter, EagleDrafter, MedusaDrafter, ModelDrafter, MTPDrafter, PARDDrafter, PEagleDrafter
from drafters.heads.eagle import Eagle3Head
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.mtp import embedding_first, save_mtp
from drafters.peagle import PEagleHead
from experiments.exporting.folders import KINDS, Source, compare, kind_of, read
from experiments.train import train
from specdec import Engine, SamplingParams, Target
from specdec.checks import playing
from tests.components import block_head, markov_head, wide
from tests.drafters.test_mtp import head_of
from tests.experiments.conftest import VOCAB_SIZE
from tests.experiments.runs import Configure
from tests.models import tiny_model
from verifiers import RejectionVerifier

Folder = Callable[..., Path]
IDS = [token for token in range(VOCAB_SIZE) if token % 3]
SAVED = {"medusa": "medusa", "eagle": "eagle", "lm": "drafter", "pard": "pard"}
"""The kinds that are among the saved models, and their folders."""


def eagle3(target: Target, folder: Path, kind: type[Eagle3Head] = Eagle3Head, **options: Any) -> None:
    given = {"hidden_layers": (1, 2, 3), "draft_ids": IDS} | options
    save_eagle(wide(kind.for_target(target.model, **given), 1.5), folder)


WRITE: dict[str, Callable[..., object]] = {
    "eagle3": eagle3,
    "peagle": partial(eagle3, kind=PEagleHead, mask_token_id=5, tokens=4, layers=2),
    "mtp": lambda target, folder: save_mtp(head_of(target.model, hidden_first=True), folder),
    "dflash": lambda target, folder, **options: block_head(target.model, **options).save_pretrained(folder),
    "dspark": lambda target, folder: markov_head(target.model).save_pretrained(folder),
}


@pytest.fixture
def written(tmp_path: Path, saved: Path, target: Target) -> Folder:
    """Writes the folder that the trainer would have written, of a head with some options."""

    def write(kind: str, **options: Any) -> Path:
        folder = tmp_path / kind
        if kind in SAVED:
            shutil.copytree(saved / SAVED[kind], folder)
        else:
            WRITE[kind](target, folder, **options)
        (folder / "training.json").write_text(json.dumps({"target": target.name, "seed": 3}))
        return folder

    return write


@pytest.fixture
def exported(configure: Configure, tmp_path: Path) -> Folder:
    def run(folder: Path, form: str, *words: str) -> Path:
        given = ["target.name=null", f"export={{name: {folder}}}", f"format={form}", f"out={tmp_path / 'out'}"]
        train(configure("train", *given, *(word.replace("drafter.", "+export.") for word in words)))
        return tmp_path / "out"

    return run


DRAFTERS: dict[str, tuple[Any, Any]] = {"medusa": (MedusaDrafter, 2), "lm": (ModelDrafter, 2), "mtp": (MTPDrafter, 2)}
DRAFTERS |= {"eagle": (EagleDrafter, [2, 2]), "eagle3": (EagleDrafter, [2, 2]), "peagle": (PEagleDrafter, None)}
DRAFTERS |= {"pard": (PARDDrafter, None), "dflash": (BlockDrafter, None), "dspark": (BlockDrafter, [2, 1])}
"""The class of a kind, and its shape."""


def drafts(kind: str, folder: Path, target: Target) -> playing.Run:
    made, shape = DRAFTERS[kind]
    drafter = made.from_pretrained(str(folder), optimize=False, **({} if shape is None else {"shape": shape}))
    with Engine(target, drafter, RejectionVerifier(), max_length=48, optimize=False) as engine:
        sampling = SamplingParams(max_new_tokens=6, temperature=1.0, seed=5, stream=0)
        (done,) = playing.run(engine, [playing.Job((3, 1, 4, 1, 5, 9, 2, 6), sampling)])
    return done


ALWAYS = {("eagle3", "speculators"), ("mtp", KINDS["mtp"].formats[-1]), ("dspark", KINDS["dspark"].formats[-1])}
CASES = [
    pytest.param(kind, form, marks=() if (kind, form) in ALWAYS else pytest.mark.full)
    for kind, known in KINDS.items()
    for form in known.formats
]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_what_is_exported_drafts_as_before(kind: str, form: str, written: Folder, exported: Folder, target) -> None:
    folder = written(kind)
    out = exported(folder, form)
    decoder = target.model.config
    sources = [read(Source(name=str(each)), kind_of(str(each)), decoder) for each in (folder, out)]
    assert sources[0].kind == sources[1].kind == kind
    if (kind, form) == ("mtp", "speculators"):  # which joins embedding and hidden state in this order
        sources[0] = replace(sources[0], module=embedding_first(sources[0].module))  # type: ignore[arg-type]
        own, other = (load_file(each / "model.safetensors")["mtp_layers.0.input_proj.weight"] for each in (folder, out))
        hidden, embedding = own.chunk(2, dim=1)
        assert torch.equal(other, torch.cat([embedding, hidden], dim=1)) and not torch.equal(embedding, hidden)
    compare(sources[0], sources[1])
    before, after = (drafts(kind, each, target) for each in (folder, out))
    assert before.tokens == after.tokens
    assert any(len(draft.nodes) > 1 for draft in before.drafts)
    for one, other in zip(before.drafts, after.drafts, strict=True):
        assert one.difference(other, 1e-5) is None
    told = json.loads((out / "specdec.json").read_text())
    assert (told["target"], told["seed"], told["format"]) == (target.name, 3, form)
    assert told["target_revision"].startswith("files:")


def test_a_difference_would_be_found(written: Folder) -> None:
    """The comparison above, of a head with one whose layers, norm or weights are others."""
    head = load_eagle(written("eagle3"))
    found = read(Source(name=str(written("eagle3"))), "eagle3")
    compare(found, found)
    for name, value in {"hidden_layers": (0, 2, 3), "feeds_normed": True}.items():
        other = load_eagle(written("eagle3"))
        setattr(other, name, value)
        with pytest.raises(RuntimeError, match=f"not what was read back: {name}"):
            compare(found, type(found)(found.kind, other))
    next(head.parameters()).data[0] += 1
    with pytest.raises(RuntimeError, match="not what was read back: model"):
        compare(found, type(found)(found.kind, head))


SPECULATORS_EAGLE3 = {
    *("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
}
"""Keys that vLLM or speculators read of this type, besides those of all."""


def test_a_folder_for_vllm_says_all_that_it_asks(written: Folder, exported: Folder, target: Target) -> None:
    out = exported(written("eagle3"), "speculators", "tokens=2", "drafter.dtype=bfloat16")
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config.keys() >= SPECULATORS_EAGLE3
    assert "model_type" not in config
    told = config["speculators_config"]
    assert told["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 2, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    ]
    assert (told["algorithm"], told["default_proposal_method"]) == ("eagle3", "greedy")
    assert told["verifier"] == {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]}
    layers = config["transformer_layer_config"]
    assert (layers["vocab_size"], layers["hidden_size"], layers["dtype"]) == (VOCAB_SIZE, 32, "bfloat16")
    assert layers["model_type"] == "llama"
    tensors = load_file(out / "model.safetensors")
    assert {each.dtype for each in tensors.values() if each.is_floating_point()} == {torch.bfloat16}
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (tensors["d2t"] + torch.arange(len(IDS))).tolist() == IDS
    assert tensors["t2d"].nonzero()[:, 0].tolist() == IDS and config["draft_vocab_size"] == len(IDS)
    assert not any(name.startswith("midlayer.") for name in tensors)


SGLANG_EAGLE3 = {
    *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    *(f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
"""Tensors that SGLang looks for. Others it leaves out, and missing ones stay random, without a word."""


def test_an_eagle3_head_for_sglang(written: Folder, exported: Folder) -> None:
    out = exported(written("eagle3"), "sglang")
    config = json.loads((out / "config.json").read_text())
    assert load_file(out / "model.safetensors").keys() == SGLANG_EAGLE3
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    # SGLang counts outputs of layers, and adds one.
    assert [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]] == [1, 2, 3]
    assert (config["num_hidden_layers"], config["draft_vocab_size"]) == (1, len(IDS))
    assert not config["tie_word_embeddings"]


def test_a_folder_that_holds_something_is_not_touched(written: Folder, exported: Folder) -> None:
    folder = written("dflash")
    out = exported(folder, "native")
    (out / "notes.txt").write_text("mine")
    (out / "model.safetensors.index.json").write_text('{"weight_map": {}}')  # would be read first
    with pytest.raises(ValueError, match=r"is not empty: give another folder, or replace its drafter with overwrite"):
        exported(folder, "speculators")
    assert "dflash_config" in json.loads((out / "config.json").read_text())
    (folder / "training.json").unlink()
    with pytest.raises(ValueError, match=r"^format=speculators names the target.*: give target\.name=NAME$"):
        exported(folder, "speculators", "overwrite=true")
    exported(folder, "speculators", "overwrite=true", "target.name=some/target")  # which is not on this machine
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"name_or_path": "some/target", "architectures": []}
    assert "dflash_config" not in config and (out / "notes.txt").read_text() == "mine"
    assert kind_of(str(out)) == "dflash" and not (out / "model.safetensors.index.json").exists()
    with pytest.raises(ValueError, match="is the folder that the drafter is read from"):
        exported(folder, "native", f"out={folder}", "overwrite=true")


@pytest.mark.parametrize(
    ("kind", "options", "words", "message"),
    [
        ("dflash", {}, ["drafter.hidden_layers=[9]"], r"states \[9\] does not fit the target .* of 4"),
        ("dflash", {}, ["tokens=4"], "drafts 3 tokens per round, give at most as many"),
        ("medusa", {}, ["drafter.mask_token_id=3"], r"^export\.mask_token_id: .* holds Medusa heads, which has none"),
        ("lm", {}, ["target.name={tmp}/other"], "a small causal LM of 257 tokens does not fit .* of 247"),
        ("lm", {}, ["format=speculators"], r"^format=speculators: .*; give format=native or format=sglang$"),
        ("eagle3", {"owns_embeddings": True}, ["format=sglang"], "owns_embeddings=False, and this one has True"),
        ("eagle3", {"hidden_layers": (0, 2, 3)}, ["format=sglang"], r"not the embeddings \(0\)"),
        ("eagle3", {"hidden_layers": (1, 1, 3)}, ["format=speculators"], "each one once"),
        ("dflash", {"shifted": True}, ["format=sglang"], "no shifted places without a Markov"),
    ],
)
def test_what_does_not_fit_is_refused(kind, options, words, message, written, exported, tmp_path: Path) -> None:
    folder = written(kind, **options)
    tiny_model("llama", vocab_size=VOCAB_SIZE - 10).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=message):
        exported(folder, "native", *(word.format(tmp=tmp_path) for word in words))
    assert {path.name for path in tmp_path.iterdir()} == {kind, "other"}, "nothing is left behind"
