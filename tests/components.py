"""Every drafter and every exact verifier of the project, made for a tiny target: what the generic tests run over.

Add a line for a new component; the lossless, distribution and batch tests pick it up.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from drafters import BlockDrafter, BlockHead, EagleDrafter, MTPDrafter, PARDDrafter, SamDrafter, SelfDrafter, UnoDrafter
from drafters.combined import AdaptiveDrafter, ChoiceDrafter, MergedDrafter
from drafters.corpus import Corpus
from drafters.heads.base import FeatureHead
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.mtp import MTPHead
from drafters.hydra import HydraDrafter, HydraHeads, PrefixAttention
from drafters.lookahead import LookaheadDrafter
from drafters.lora import Lora
from drafters.marginals import MarginalDrafter
from drafters.medusa import MedusaDrafter, MedusaHeads
from drafters.model import ModelDrafter
from drafters.ngram import NGramDrafter
from drafters.other_vocabulary import SLEMDrafter, TLIDrafter
from drafters.peagle import PEagleDrafter, PEagleHead
from drafters.recycling import TokenRecyclingDrafter
from drafters.redrafter import RecurrentHead, ReDrafter
from drafters.rest import RestDrafter
from drafters.staged import StagedDrafter
from drafters.suffix import SuffixDrafter
from specdec import Drafter, DraftSampling, Verifier
from specdec.drafting.builders import BeamSearchTree, ExpansionTree, PricedTree, ReplayedTree, RheoTree, SampledTree
from specdec.drafting.policies import AdditiveLength, ConfidenceNodes, LoopedNodes
from specdec.target.adapters import Matrices
from verifiers import GreedyMultiPathVerifier, KSeqVerifier, RejectionVerifier, SharedNoiseVerifier, TargetWalkVerifier
from verifiers.block import BlockVerifier, TraversalVerifier
from verifiers.two_draft import TwoDraftVerifier
from verifiers.weighted_transport import WeightedTransportVerifier

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]

DOMINO = {"shifted": True, "gru_hidden_dim": 4, "emb_dim": 4}
WITHOUT = DraftSampling.WITHOUT_REPLACEMENT
DISTANCE = 0.1
"""How far a drafter's weights are from the target's, by default: it mostly agrees with it."""


def perturbed(model: PreTrainedModel, amount: float) -> PreTrainedModel:
    """A copy of a model with noise of ``amount`` standard deviations on its weights."""
    twin = type(model)(copy.deepcopy(model.config)).float().eval()
    twin.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    for parameter in twin.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise * parameter.data.std() * amount)
    return twin.to(model.device)  # type: ignore[arg-type]


def renumbered(model: PreTrainedModel, tokens: list[int]) -> PreTrainedModel:
    """A copy of a model whose token i is what token ``tokens[i]`` is in the model."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {f"{name}.{part}" for name, each in model.named_modules() if each in tables for part in ("weight", "bias")}
    config = copy.deepcopy(model.config)
    config.vocab_size = len(tokens)
    twin = type(model)(config).float().eval()
    twin.load_state_dict({name: each[tokens] if name in names else each for name, each in model.state_dict().items()})
    return twin.to(model.device)  # type: ignore[arg-type]


def lettered(names: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with these tokens; one of several letters is joined of two others."""
    cuts = [(name[:cut], name[cut:]) for name in sorted(names, key=len) for cut in range(1, len(name))]
    joined = {left + right: (left, right) for left, right in cuts if {left, right} <= set(names)}
    made = Tokenizer(BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(joined.values())))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def other_vocabulary(target: PreTrainedModel, distance: float) -> dict[str, Any]:
    """A drafting model much like the target, without its last token, with another, and under other numbers."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: rows(target)]
    own = [*range(rows(target) - 2, -1, -1), rows(target) - 1]
    return {
        "model": renumbered(perturbed(target, distance), own),
        "tokenizer": lettered([*(letters[token] for token in own[:-1]), letters[0] + letters[1]]),
        "target_tokenizer": lettered(letters),
    }


def text_drafter(tokens: int, target_tokenizer: PreTrainedTokenizerFast, **model: Any) -> SLEMDrafter:
    """Drafts what a model of another vocabulary writes."""
    return SLEMDrafter(ModelDrafter(shape=tokens, **model), target_tokenizer=target_tokenizer)


def medusa_heads(model: PreTrainedModel, num_heads: int = 3) -> MedusaHeads:
    """Heads that start as the target's output layer, with some noise in their blocks."""
    torch.manual_seed(7)
    weight = model.get_output_embeddings().weight
    heads = MedusaHeads(num_heads=num_heads, hidden_size=weight.shape[1], vocab_size=weight.shape[0])
    for head in heads.heads:
        head[-1].weight.data.copy_(weight)
        torch.nn.init.normal_(head[0].linear.weight, std=0.2)
    return heads


def hydra_heads(model: PreTrainedModel, num_heads: int = 3, num_layers: int = 1, *, prefix: bool = False) -> HydraHeads:
    """Heads that mostly say what the target does after the hidden state, and depend on their tokens, too."""
    weight = model.get_output_embeddings().weight
    torch.manual_seed(7)
    own = wide(PrefixAttention.for_target(model), 1.5) if prefix else None
    sizes = {"num_heads": num_heads, "hidden_size": weight.shape[1], "vocab_size": weight.shape[0]}
    heads = HydraHeads(**sizes, num_layers=num_layers, prefix=own)
    for name, parameter in heads.named_parameters():
        if name.startswith("lm_head.") and name.endswith("weight"):
            parameter.data.copy_(weight)
        elif name.endswith("res_connection.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
            parameter.data[:, : weight.shape[1]].fill_diagonal_(1.0)
    return heads


def recurrent_head(model: PreTrainedModel, **settings: Any) -> RecurrentHead:
    """A head that mostly says what the target does after the hidden state, and depends on its tokens, too."""
    weight = model.get_output_embeddings().weight
    head = RecurrentHead(hidden_size=weight.shape[1], vocab_size=weight.shape[0], **settings)
    with torch.no_grad():
        head.begin_as(model.get_output_embeddings())
        generator = torch.Generator().manual_seed(7)
        for parameter in head.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return head.eval()


def corpus(model: PreTrainedModel) -> Corpus:
    """A few documents of what the model says by itself, after every fourth token."""
    documents = torch.arange(0, rows(model), 4, device=model.device)[:, None]
    with torch.no_grad():
        for _ in range(4):
            following = model(documents).logits[:, -1].argmax(-1, keepdim=True)
            documents = torch.cat([documents, following], dim=1)
    return Corpus.of(documents.tolist())


def noisy_adapter(model: PreTrainedModel, amount: float) -> Matrices:
    """A low-rank change of a model's last products, of about ``amount`` of their size."""
    generator = torch.Generator().manual_seed(5)
    layers = [(name, m) for name, m in model.named_modules() if name.endswith(("down_proj", "o_proj", "mlp.c_proj"))]
    shapes = {name: m.weight.shape if hasattr(m, "nf") else m.weight.shape[::-1] for name, m in layers}  # GPT-2's
    lora = Lora({name: (shape[0], shape[1]) for name, shape in shapes.items()}, rank=2)
    for down, up, (_, m) in zip(lora.down, lora.up, layers, strict=True):
        down.data = torch.randn(down.shape, generator=generator) * down.shape[1] ** -0.5
        up.data = torch.randn(up.shape, generator=generator) * m.weight.std().cpu() * amount * 4
    return {
        n: (down.detach().to(model.device), up.detach().to(model.device)) for n, (down, up) in lora.matrices.items()
    }


def block_head(model: PreTrainedModel, **settings: Any) -> BlockHead:
    """A head with random layers. A Markov head makes it draft what the target says after single tokens."""
    torch.manual_seed(11)
    head = BlockHead.for_target(model, layers=1, block_size=4, hidden_layers=(1,), **settings).eval()
    for parameter in head.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    if head.markov_head is not None:
        vocab = head.config.vocab_size
        with torch.no_grad():
            logits = model(torch.arange(vocab, device=model.device)[:, None]).logits[:, 0]
            head.markov_head.markov_w1.weight.copy_(torch.eye(vocab))
            head.markov_head.markov_w2.weight.copy_(logits.T)
    return head


def markov_head(model: PreTrainedModel) -> BlockHead:
    return block_head(model, shifted=True, markov_rank=model.get_input_embeddings().weight.shape[0])


Head = TypeVar("Head", bound=FeatureHead)


def wide(head: Head, factor: float = 6.0) -> Head:
    """A random head with weights so large that its logits depend on its features and on everything before."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data.copy_(noise * factor * parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            parameter.data.copy_(noise * 0.1)
    return head


def eagle_head(model: PreTrainedModel) -> EagleHead:
    """Joins the embedding and the target's last hidden state, and borrows the target's output layer."""
    return wide(EagleHead.for_target(model), 1.5)


def mtp_head(model: PreTrainedModel) -> MTPHead:
    """A module as MiMo's: the hidden state first. Models without RMSNorm have none."""
    if model.config.model_type in ("gpt2", "phi"):
        pytest.skip(f"{model.config.model_type} has layers of another form than MTP modules")
    return wide(MTPHead.for_target(model, hidden_first=True), 1.5)


def eagle3_head(model: PreTrainedModel) -> Eagle3Head:
    """Fuses three hidden states; every token but one has a column."""
    ids = [token for token in range(rows(model)) if token != 3]
    return wide(Eagle3Head.for_target(model, hidden_layers=(0, 1, -1), draft_ids=ids), 1.5)


def peagle_head(model: PreTrainedModel) -> PEagleHead:
    """Fuses three hidden states; the last token but one is the mask."""
    # Of larger weights, two layers and a mask turn rounding's last bit into other drafts.
    return wide(PEagleHead.for_target(model, hidden_layers=(0, 1, -1), layers=2, mask_token_id=rows(model) - 2), 1.0)


def reduced(drafter: Any) -> Drafter:
    """The same drafter, whose draft vocabulary has the last tokens, as if they were the most frequent ones."""
    drafter.vocabulary._counts = lambda target: torch.arange(target.vocab_size)
    return drafter


def respelled(drafter: Any) -> Drafter:
    """The same drafter, some of whose tokens are other text than the target's of the same number."""
    drafter.shared = lambda target: torch.tensor([token for token in range(target.vocab_size) if token % 4 != 2])
    return drafter


def rows(target: PreTrainedModel) -> int:
    return target.get_output_embeddings().weight.shape[0]


def model_drafter(*given: Any, **options: Any) -> Callable[..., Drafter]:
    return lambda target, distance=DISTANCE: ModelDrafter(perturbed(target, distance), *given, **options)


DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "ngram": lambda target, **_: NGramDrafter(max_draft_tokens=4, branches=2, max_ngram=3),
    "lookahead": lambda target, **_: LookaheadDrafter(ngram=4, window=3, guesses=2),
    "rest": lambda target, **_: RestDrafter(corpus(target), max_nodes=6, max_depth=3, min_match=1),
    "sam": lambda target, **_: SamDrafter(corpus(target), max_draft_tokens=4, threshold=1, corpus_bias=1, factor=2.0),
    "recycling": lambda target, **_: TokenRecyclingDrafter(TREE, scope="request"),
    "suffix": lambda target, **_: SuffixDrafter(6, mode="tree", tree_depth=8, shared=True),
    "choice": lambda target, distance=DISTANCE: ChoiceDrafter(
        SuffixDrafter(4, factor=2.0), ModelDrafter(perturbed(target, 5 * distance), TREE, sampling="iid"), start=0.4
    ),
    "merged": lambda target, distance=DISTANCE: MergedDrafter(
        TokenRecyclingDrafter(TREE, scope="request"),
        ModelDrafter(perturbed(target, 5 * distance), [2, 1], sampling=WITHOUT),
    ),
    "marginals": lambda target, **_: MarginalDrafter(TREE, samples=3, sampling=WITHOUT),
    "medusa": lambda target, **_: MedusaDrafter(medusa_heads(target), TREE),
    "hydra": lambda target, **_: HydraDrafter(hydra_heads(target), TREE, sampling=WITHOUT),
    "hydra_plus": lambda target, **_: HydraDrafter(hydra_heads(target, prefix=True), 3, sampling="iid"),
    "redrafter": lambda target, **_: ReDrafter(recurrent_head(target), BeamSearchTree(3, 3)),
    "redrafter_chain_iid": lambda target, **_: ReDrafter(recurrent_head(target), 3, sampling="iid"),
    "eagle_tree_without_replacement": lambda target, **_: EagleDrafter(eagle_head(target), TREE, sampling=WITHOUT),
    "eagle3_chain_iid": lambda target, **_: EagleDrafter(eagle3_head(target), 3, sampling="iid"),
    "eagle3_expansion": lambda target, **_: EagleDrafter(eagle3_head(target), ExpansionTree(nodes=8, depth=3, width=3)),
    "peagle_tree_without_replacement": lambda target, **_: PEagleDrafter(peagle_head(target), TREE, sampling=WITHOUT),
    "pard_chain_iid": lambda target, distance=DISTANCE: PARDDrafter(
        perturbed(target, distance), 3, sampling="iid", mask_token_id=rows(target) - 2
    ),
    "uno_chain_iid": lambda target, distance=DISTANCE: UnoDrafter(noisy_adapter(target, distance), 3, sampling="iid"),
    "tli_tree_without_replacement": lambda target, distance=DISTANCE: TLIDrafter(
        shape=TREE, sampling=WITHOUT, **other_vocabulary(target, distance)
    ),
    "slem": lambda target, distance=DISTANCE: text_drafter(3, **other_vocabulary(target, distance)),
    "self_chain_iid": lambda target, **_: SelfDrafter(["1.mlp"], 3, sampling="iid"),
    "exit_tree_without_replacement": lambda target, **_: SelfDrafter(["1-"], TREE, sampling=WITHOUT),
    "quantized_chain_iid": lambda target, **_: SelfDrafter(quantization="int4", sampling="iid", shape=3),
    "staged_chain_iid": lambda target, distance=DISTANCE: StagedDrafter(
        ModelDrafter(perturbed(target, distance), 3),
        StagedDrafter(SelfDrafter(["1.mlp"], 2), NGramDrafter(1, branches=1), RejectionVerifier()),
        BlockVerifier(),
    ),
    "mtp_chain_iid": lambda target, **_: MTPDrafter(mtp_head(target), 3, sampling="iid"),
    "mtp_priced": lambda target, **_: MTPDrafter(mtp_head(target), PricedTree(nodes=8, depth=3, width=3)),
    "model_chain_iid": model_drafter(3, sampling="iid"),
    "model_tree_iid": model_drafter(TREE, sampling="iid"),
    "model_paths_iid": model_drafter([3, 1, 1], sampling="iid"),
    "model_tree_without_replacement": model_drafter(TREE, sampling=WITHOUT),
    "model_tree_deterministic": model_drafter([2, 2, 1], sampling="deterministic"),
    "model_tree_coupled": model_drafter(TREE, sampling="coupled"),
    "model_expansion": model_drafter(ExpansionTree(7, 3, 3, children=5, among=8, depth_cost=0.2)),
    "model_sampled_tree": model_drafter(SampledTree(nodes=7, depth=3, width=3)),
    "model_rheo": model_drafter(RheoTree(nodes=7, depth=3, width=3)),
    "model_by_confidence": lambda target, distance=DISTANCE: ModelDrafter(
        perturbed(target, distance), SampledTree(nodes=7, depth=3, width=3), sampling=WITHOUT
    ).pruned_by(ConfidenceNodes(0.01)),
    "block_by_confidence": lambda target, **_: BlockDrafter(markov_head(target), TREE, sampling=WITHOUT).pruned_by(
        ConfidenceNodes(0.05, learn=False)
    ),
    "eagle3_looped": lambda target, **_: EagleDrafter(eagle3_head(target), 4, sampling="iid").pruned_by(
        LoopedNodes(-2.0)
    ),
    "adaptive": lambda target, distance=DISTANCE: AdaptiveDrafter(
        ModelDrafter(perturbed(target, distance), TREE, sampling=WITHOUT), AdditiveLength(start=2)
    ),
    "model_reduced": lambda target, distance=DISTANCE: reduced(
        ModelDrafter(perturbed(target, distance), TREE, sampling=WITHOUT, vocabulary=rows(target) - 1)
    ),
    "model_respelled": lambda target, distance=DISTANCE: respelled(
        ModelDrafter(perturbed(target, distance), 3, sampling="iid")
    ),
    "eagle3_reduced": lambda target, **_: reduced(
        EagleDrafter(eagle3_head(target), 3, sampling="iid", vocabulary=rows(target) - 2)
    ),
    "medusa_reduced": lambda target, **_: reduced(
        MedusaDrafter(medusa_heads(target), TREE, sampling=WITHOUT, vocabulary=rows(target) - 1)
    ),
    "block_reduced": lambda target, **_: reduced(
        BlockDrafter(markov_head(target), TREE, sampling=WITHOUT, vocabulary=rows(target) - 1)
    ),
    "model_chain_own_temperature": model_drafter(2, sampling="iid", temperature=0.6),
    "medusa_sampled": lambda target, **_: MedusaDrafter(medusa_heads(target), TREE, sampling=WITHOUT),
    "block_chain": lambda target, **_: BlockDrafter(block_head(target)),
    "block_tree": lambda target, **_: BlockDrafter(block_head(target), ExpansionTree(6, 3, 6)),
    "block_markov_chain": lambda target, **_: BlockDrafter(markov_head(target), 3),
    "block_markov_tree": lambda target, **_: BlockDrafter(markov_head(target), TREE, sampling=WITHOUT),
    "block_selector_chain": lambda target, **_: BlockDrafter(
        block_head(target, selector_rank=4, selector_top_k=3, conv_kernel_size=2, conv_group_size=8)
    ),
    "block_domino_tree": lambda target, **_: BlockDrafter(block_head(target, **DOMINO), TREE, sampling=WITHOUT),
    "block_domino_replayed": lambda target, **_: BlockDrafter(
        block_head(target, **DOMINO), ReplayedTree(nodes=7, depth=3, width=3)
    ),
    "block_refined_chain": lambda target, **_: BlockDrafter(block_head(target, xpress_rank=4)),
    "block_refiner_tree": lambda target, **_: BlockDrafter(
        block_head(target, xpress_rank=4), TREE, passes=0, sampling=WITHOUT
    ),
}

VERIFIERS: dict[str, type[Verifier]] = {
    "rejection": RejectionVerifier,
    "block": BlockVerifier,
    "traversal": TraversalVerifier,
    "kseq": KSeqVerifier,
    "target_walk": TargetWalkVerifier,
    "two_draft": TwoDraftVerifier,
    "weighted_transport": WeightedTransportVerifier,
    "greedy_multipath": GreedyMultiPathVerifier,
    "shared_noise": SharedNoiseVerifier,
}
READS_NODES = ("lookahead", "slem", "staged_chain_iid")
"""Drafters that need on the host what the target said of their nodes, or what their model wrote or accepted."""
EVERYWHERE = "rejection"
"""The verifier that is tried with every architecture and sampling; the others with one of each."""

TRIED_WITH = {
    "two_draft": ("model_tree_iid", "model_chain_iid"),
    "weighted_transport": ("model_tree_iid", "model_tree_without_replacement"),
    "greedy_multipath": ("model_paths_iid",),
}
"""Rules that are tried with the drafts they are for; every draft is tried with all others."""

STRONGEST = dict.fromkeys(VERIFIERS, "model_tree_without_replacement") | {
    "block": "model_chain_iid",
    "kseq": "model_tree_iid",
    "target_walk": "model_tree_coupled",
    "two_draft": "model_tree_iid",
    "weighted_transport": "model_tree_iid",
    "greedy_multipath": "model_paths_iid",
    "shared_noise": "model_tree_coupled",
}
"""For every rule the drafts that ask most of it: what runs by default, where all others are marked ``full``."""


def tried(drafter: str, verifier: str) -> bool:
    """Whether the generic tests try a pair: time is short, and paths are a tree like others but for one rule."""
    if drafter == "model_paths_iid":
        return verifier == "greedy_multipath"
    return drafter in TRIED_WITH.get(verifier, DRAFTERS)


def fitting(drafter: Drafter) -> Verifier:
    """A verifier for tests of something else: the one for coupled drafts, and rejection for all others."""
    return SharedNoiseVerifier() if DraftSampling.COUPLED in drafter.laws else RejectionVerifier()


def skip_unfit(drafter: Drafter, verifier: Verifier) -> None:
    """Skip the test, with the verifier's own sentence, if it refuses the drafter."""
    try:
        verifier.check(drafter)
    except ValueError as refusal:
        pytest.skip(str(refusal))
