"""Adapters: Uno's over noise and LoRA's of small models, served as they are trained; and those that requests choose."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from drafters.heads.training import TargetStates, TextBatch
from drafters.lora import TrainedLora, write_adapter
from drafters.model import ModelDrafter
from drafters.reduced import twin_of
from drafters.uno import TrainedUno, UnoDrafter
from experiments.exporting.folders import Source, kind_of, read
from specdec import Batch, Engine, Paging, SamplingParams, Target
from specdec.drafting.window import ParallelScorer
from specdec.execution.forwards import ReplayExecutor
from specdec.interfaces import Round
from specdec.target import adapters, loading
from tests.components import DRAFTERS, fitting, noisy_adapter
from tests.drafters.agreeing import agreements
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("untried"),
    # peft asks transformers for something that transformers will rename.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
VOCAB, DEPTH = 24, 3
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]


@pytest.fixture
def model() -> Any:
    return tiny_model(vocab_size=VOCAB)


def with_weights(head: Any) -> None:
    """Make an adapter, which is trained from nothing, change what its model says."""
    for up in head.head.up:
        torch.nn.init.normal_(up, std=0.3)


NOISE = torch.tensor([4, 7, 2])


def test_every_depth_says_what_the_adapted_model_says_behind_noise(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is one row and one forward by peft's own rule: a token through the adapter, or not."""
    init, drawn = ParallelScorer.__init__, []

    def with_known_noise(self: ParallelScorer, *given: Any, fill: Any, **more: Any) -> None:
        def noise(batch: Batch, count: int) -> torch.Tensor:
            drawn.append(fill(batch, count))
            return NOISE[:count].expand(len(batch), -1)

        init(self, *given, fill=noise, **more)

    monkeypatch.setattr(ParallelScorer, "__init__", with_known_noise)
    adapter, twin = noisy_adapter(model, 0.5), twin_of(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    adapted = adapters.Adapters(twin, {"uno": adapter})

    def law(known: list[int], path: list[int], chosen: int = 1) -> torch.Tensor:
        tokens = torch.tensor([[*known, *NOISE]])
        adapted.choice.set(chosen * (torch.arange(tokens.shape[1]) >= len(known))[None].long())
        return twin(tokens).logits[0, len(known) + len(path) - 2].softmax(-1)

    drafter = UnoDrafter(adapter, DEPTH, noise_below=9)
    found, _ = agreements(Target(model), drafter, law, prompts=PROMPTS)
    assert all(same for _, same in found) and len(found) > 20
    assert all((fill >= 1).all() and (fill < 9).all() for fill in drawn)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    # The mutant: noise through the base weights. The first depth is the target's own.
    found, _ = agreements(Target(model), drafter, partial(law, chosen=0), prompts=PROMPTS)
    assert all(same == (depth == 0) for depth, same in found)


def test_uno_is_trained_as_it_is_served(model: Any, tmp_path: Path) -> None:
    head = TrainedUno(depths=DEPTH, rank=4, keeps=1.0)
    head.begin(Target(model), None)
    with_weights(head)
    tokens, places = torch.arange(14)[None] * 7 % 5 + 3, torch.arange(14)[None]
    batch = TextBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), places)
    anchors = head.eval().anchors(batch, torch.Generator().manual_seed(1))
    states = head(batch, TargetStates({}, lambda given: given), anchors).states
    at = anchors.index == 5
    trained = torch.cat([head.logits(states[d][at], anchors.index[at], d + 1) for d in range(DEPTH)])
    trained.tanh().sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in head.parameters() if each.requires_grad)
    assert all(each.grad is None for each in model.parameters())
    drafts, generator = anchors.valid[:, 1:].nonzero()[:, 0], torch.Generator().manual_seed(head._seed)
    noise = torch.randint(1, VOCAB, (1, len(drafts)), generator=generator)[:, at[drafts]]
    drafter: Any = head.drafter()
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_length=40)
    scorer: Any = engine.session.scorer  # pyright: ignore[reportOptionalMemberAccess]
    scorer._fill = lambda batch, count: noise[:, :count]
    seen: list[Round] = []
    engine.on_round = seen.append
    engine.generate([batch.tokens[0, :6].tolist()], SamplingParams(max_new_tokens=6, temperature=1.0))
    served = seen[0].tree.draft_probs
    assert served is not None
    torch.testing.assert_close(served[0, :DEPTH], trained.detach().softmax(-1), atol=1e-4, rtol=1e-3)
    # The saved folder is peft's, and loads with the same weights up to bfloat16.
    head.save(tmp_path / "saved", {})
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "saved")).r == 4
    loaded = UnoDrafter.from_pretrained(tmp_path / "saved", shape=DEPTH, optimize=False)
    session: Any = Engine(Target(model), loaded, RejectionVerifier(), max_length=40).session
    for layer, (down, up) in head.head.matrices.items():
        adapted = session.scorer.runner.model.get_submodule(layer)
        torch.testing.assert_close(adapted.down, down.detach().bfloat16().float())
        torch.testing.assert_close(adapted.up, up.detach().bfloat16().float())


def test_a_published_folder_loads_and_others_are_refused(model: Any, tmp_path: Path) -> None:
    write_adapter(tmp_path / "uno" / "adapter", noisy_adapter(model, 0.5), base="tiny")
    drafter = UnoDrafter.from_pretrained(tmp_path / "uno", shape=[2, 1])
    Engine(Target(model), drafter, RejectionVerifier())
    other = tiny_model(vocab_size=VOCAB, layers=2)
    with pytest.raises(ValueError, match=r"of another base \(tiny\): its .*layers\.2.* there"):
        Engine(Target(other), drafter, RejectionVerifier())
    with pytest.raises(ValueError, match=r"no adapter at .*: give a folder with adapter_config\.json"):
        UnoDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"noise_below={VOCAB + 1}: the target .* has {VOCAB} tokens"):
        Engine(Target(model), UnoDrafter(noisy_adapter(model, 0.5), noise_below=VOCAB + 1), RejectionVerifier())


ALONE = torch.arange(9)[None] * 7 % VOCAB


@pytest.fixture
def base(tmp_path: Path) -> str:
    tiny_model(vocab_size=VOCAB, layers=2, seed=3).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def packed() -> TextBatch:
    """Two rows of two documents each; one of them is ``ALONE``."""
    tokens = torch.stack([torch.cat([ALONE[0], ALONE[0, :5] + 1]), torch.arange(14) * 3 % VOCAB])
    documents = torch.tensor([[0] * 9 + [1] * 5] * 2)
    positions = torch.tensor([[*range(9), *range(5)]] * 2)
    return TextBatch(tokens, torch.ones_like(tokens).bool(), documents, positions)


def test_a_lora_is_trained_as_it_is_served(base: str, tmp_path: Path) -> None:
    target = Target(tiny_model(vocab_size=VOCAB), name="tiny")
    head = TrainedLora(name=base, rank=4)
    head.begin(target, None)
    with_weights(head)
    batch, states = packed(), TargetStates({}, lambda given: given)
    prediction = head(batch, states, head.anchors(batch, torch.Generator()))
    # The first document, where it has a successor.
    wanted = head.logits(prediction.states[0][:8], batch.tokens[0, :8], 1).detach()
    served: Any = head.drafter()
    torch.testing.assert_close(served.model(ALONE).logits[0, :8], wanted, rtol=1e-4, atol=1e-4)
    without = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(without(ALONE).logits[0, :8], wanted, atol=0.1), "the mutant: no adapter"

    head.save(tmp_path / "saved", {})
    theirs: Any = peft.PeftModel.from_pretrained(without, str(tmp_path / "saved"))
    assert theirs.peft_config["default"].base_model_name_or_path == base
    ours: Any = ModelDrafter.from_pretrained(base, adapter=str(tmp_path / "saved"), dtype="float32", device="cpu")
    torch.testing.assert_close(ours.model(ALONE).logits, theirs(ALONE).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.model(ALONE).logits[0, :8], wanted, rtol=0.05, atol=0.05)  # rounded to bfloat16
    exported: Any = read(Source(name=base, adapter=str(tmp_path / "saved")), "lm").module
    torch.testing.assert_close(exported(ALONE).logits, ours.model(ALONE).logits, rtol=1e-4, atol=1e-4)
    for load in (ModelDrafter.from_pretrained, kind_of):
        with pytest.raises(ValueError, match=rf"an adapter[,:].* give .*adapter[=:] ?{tmp_path / 'saved'}"):
            load(str(tmp_path / "saved"))


def test_what_cannot_be_adapted_is_refused(base: str) -> None:
    target = Target(tiny_model(vocab_size=VOCAB), name="tiny")
    with pytest.raises(ValueError, match=r"the model .*base has no linear layers named lm_head: give layers"):
        TrainedLora(name=base, layers=["lm_head"]).begin(target, None)
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(base)
    letters = Tokenizer(models.WordLevel({chr(97 + token): token for token in range(VOCAB)}))
    other = Target(target.model, PreTrainedTokenizerFast(tokenizer_object=letters), name="letters")
    with pytest.raises(ValueError, match=r"base has another vocabulary .* than the target letters"):
        TrainedLora(name=base).begin(other, None)


CHOSEN = ["few", "many", None, "many", "few", None]
TEXTS = [[random.Random(i).randrange(VOCAB) for _ in range(2 + 3 * i)] for i in range(6)]


def save_adapter(folder: Path, *, seed: int, layers: list[str], vocab: int = VOCAB, **options: object) -> str:
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=layers, task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(small(vocab), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    patterns, many = {"alpha_pattern": {"q_proj": 3}, "use_rslora": True}, ("q", "k", "v", "o", "up", "gate")
    return {
        "few": save_adapter(root / "few", seed=1, layers=["q_proj", "down_proj"], **patterns),
        "many": save_adapter(root / "many", seed=2, layers=[f"{each}_proj" for each in many]),
    }


def small(vocab: int = VOCAB) -> PreTrainedModel:
    return tiny_model(vocab_size=vocab, layers=2)


def merged(folder: str) -> PreTrainedModel:
    """The model with an adapter merged by peft itself."""
    return peft.PeftModel.from_pretrained(small(), folder).merge_and_unload()


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("model_tree_iid", {}),
        ("eagle3_expansion", {"recording": "rounds"}),
        complete("medusa", {"prefill_chunk": 4, "optimize": False}, strong=False),
        complete("model_chain_iid", {"cache": Paging(page_size=4, pages=24, reserve=0.0)}, strong=False),
    ],
)
def test_requests_of_a_batch_follow_the_adapters_that_they_choose(folders, drafter, options) -> None:
    made, sampling = DRAFTERS[drafter](small()), SamplingParams(max_new_tokens=12)
    engine = Engine(Target(small(), adapters=folders), made, fitting(made), max_batch_size=3, max_length=48, **options)
    engine.warm_up()  # captured forwards choose anew at every replay
    outputs = engine.generate(TEXTS, [replace(sampling, adapter=name) for name in CHOSEN])
    assert not isinstance(engine.runner.executor, ReplayExecutor) or engine.runner.executor.recordings.replays > 0
    models = {name: small() if name is None else merged(folders[name]) for name in set(CHOSEN)}
    for output, name in zip(outputs, CHOSEN, strict=True):
        by_model = {each: reference_decode(models[each], list(output.prompt_ids), sampling) for each in models}
        assert [each for each, tokens in by_model.items() if tokens == list(output.token_ids)] == [name]


def test_one_adapter_is_merged_into_the_weights(folders: dict[str, str], tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    model = adapters.merge(AutoModelForCausalLM.from_pretrained(tmp_path), folders["many"])
    ours = dict(model.named_parameters())
    for name, parameter in merged(folders["many"]).named_parameters():
        torch.testing.assert_close(ours[name], parameter)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_what_is_no_adapter_of_the_target_is_refused(folders: dict[str, str], tmp_path, monkeypatch) -> None:
    def refused(message: str, **named: str) -> None:
        model = small()
        with pytest.raises(ValueError, match=message):
            Target(model, adapters=named)
        assert not any(isinstance(module, adapters.AdaptedLinear) for module in model.modules())

    other = save_adapter(tmp_path / "other", seed=1, layers=["lm_head"], vocab=VOCAB + 8)
    refused(rf"of another base .* is \[32, 3\], and this model has a layer of 32 to {VOCAB} there", other=other)
    for named, layer, dora in (("", "q_proj", True), ("lm_head.*", "lm_head", False), ("", "embed_tokens", False)):
        folder = save_adapter(tmp_path / f"only {layer}", seed=1, layers=[layer], use_dora=dora)
        refused(f"{named} no request can choose: merge it", only=folder)
    half = Path(save_adapter(tmp_path / "half", seed=1, layers=["q_proj"])) / "adapter_model.safetensors"
    tensors = load_file(half)
    gone = sorted(tensors)[-1]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, half)
    refused(f"half' is incomplete: the tensor {gone} is missing", half=str(half.parent))
    model = small()
    monkeypatch.setattr(loading, "_read", None)  # before the model is loaded
    model.save_pretrained(tmp_path / "model")
    for given in ({"adapter": "nowhere"}, {"adapters": {"some": "nowhere"}}):
        with pytest.raises(ValueError, match="no adapter at 'nowhere'"):
            Target.from_pretrained(str(tmp_path / "model"), **given)
    for made, name, has in ((Target(small(), adapters=folders), "x", "'few', 'many'"), (Target(model), "few", "none")):
        with pytest.raises(ValueError, match=f"the target has {has}"):
            Engine(made).generate([[1]], SamplingParams(adapter=name))
    with pytest.raises(ValueError, match="share no beginnings"):
        Engine(Target(model, adapters=folders), cache=Paging(page_size=4, shared=True))
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    refused(r"pip install 'specdec-research\[peft\]'", few=folders["few"])
