"""Finds out what is known about a model, once, and whether it can decode over our cache.

No list of models is needed: ``find`` compares a forward over the cache with the model's own (``differs``).
"""

import inspect
import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from specdec.attention import BACKENDS, AttentionBackend
from specdec.attention.call import configs_of, switched
from specdec.attention.facts import Facts
from specdec.cache.formats import check_format
from specdec.cache.paged import cache_of
from specdec.cache.pages import Paging
from specdec.cache.probe import ShapeProbe
from specdec.cache.states import States
from specdec.cache.storage import Cache
from specdec.cache.transformers_cache import UnsupportedError, cache_argument, of_class, own_cache_class
from specdec.execution.executor import Executor, evaluating, model_lock
from specdec.execution.packing import PackedLinears
from specdec.forward import ForwardBatch
from specdec.memory import ran_out
from specdec.origin import first_sentence
from specdec.placement import main_device
from specdec.quantization.base import output_width, rounded_to
from specdec.recurrent.discovery import ROWS, TOKENS, Attributes, find_mixers
from specdec.recurrent.mixer import Mixer
from specdec.target.configuration import ALIBI, check_supported, position_limit, reaches
from specdec.topology import Topology
from specdec.tree import TreeShape

logger = logging.getLogger(__name__)

# The trial of a model has two rows of tokens with prefixes of different lengths. A tree follows each prefix; one of its
# paths (nodes 0, 2, 4) holds the row's next tokens.
TRIAL_LENGTH = 7
TRIAL_PREFIXES = (4, 2)
TRIAL_SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)])
TRIAL_PATH = [0, 2, 4]

EXPERTS = ("grouped_mm", "eager")
"""How experts are run that were loaded as ``eager``: by a kernel that does not wait for the device; else by a loop."""

# Smaller differences from the model's own forward are rounding. A wrong position or mask gives 30% and more.
TOLERANCE, HALF_TOLERANCE = 1e-2, 0.3


@dataclass(frozen=True, eq=False)
class Found:
    """A way to run a model that gives its own logits; ``reason`` also says why other backends were passed over."""

    facts: Facts
    backend: AttentionBackend
    name: str
    reason: str
    packed: PackedLinears  # with which it was tried; who lives as long has the same copies


def find(model: PreTrainedModel, *, attention: str = "auto", optimize: bool = True) -> Found:
    """Return a way to run the model that gives its own logits, by an attention backend's name or the first that works.

    This costs the model's own forward and five forwards over a small cache, of a few tokens each, for every backend and
    way of running experts; on a CPU on packed weights if ``optimize``, as its executor has them.

    Raises:
        ValueError: There is no such backend, or no way to run the model; names the model type and the reason.
    """
    if attention != "auto" and (not isinstance(attention, str) or attention not in BACKENDS):
        raise ValueError(f"attention={attention!r}: give one of auto, {', '.join(BACKENDS)}")
    names = [attention] if attention in BACKENDS else [name for name, each in BACKENDS.items() if each.automatic(model)]
    passed = {name: reason for name in names if (reason := BACKENDS[name].check(model)) is not None}
    if attention in passed:
        raise ValueError(f"attention={attention!r}: {passed[attention]}; use attention='auto'")
    check_supported(model)
    finding, cause = "", None
    with model_lock(model):
        packed = PackedLinears(model if optimize and main_device(model).type == "cpu" else nn.Identity())
        for name, experts in itertools.product([name for name in names if name not in passed], EXPERTS):
            try:
                with packed.in_use():
                    facts, own = _probe(model, experts)
                error = _trial(Executor(model, facts, BACKENDS[name], packed), own)
                if error is None:
                    others = "; ".join(["auto", *(f"not {other}: {why}" for other, why in passed.items())])
                    reason = name if attention == name else f"{name} ({others})"
                    return Found(facts, BACKENDS[name], name, reason, packed)
                problem = f"its logits differ by {error:.0%} from the model's own"
            except Exception as exception:  # whatever a model raises is the reason to refuse it
                if ran_out(exception):
                    raise
                cause = exception
                kind = "" if isinstance(exception, ValueError) else f"{type(exception).__name__}: "
                problem = kind + first_sentence(exception)
            finding = finding or problem
            passed.setdefault(name, problem)
    raise ValueError(explain(model, finding)) from cause


def make_cache(
    facts: Facts, *, max_batch_size: int, max_length: int, max_nodes: int, kv_cache: str | None = None,
    paging: Paging | None = None,
) -> Cache:  # fmt: skip
    """Return an empty cache; for the arguments and errors see ``ModelRunner``."""
    format = check_format(kv_cache)
    sizes = {"max_batch_size": max_batch_size, "max_length": max_length, "max_nodes": max_nodes}
    cache = cache_of(facts.layers, paging, format=format, device=facts.device, indexers=facts.indexers, **sizes)
    if facts.mixers:
        beside = sum(tensor.nbytes for tensor in cache.tensors)
        cache.states = States(
            [mixer.states for mixer in facts.mixers], slots=max_batch_size, length=max_length, nodes=max_nodes,
            device=facts.device, beside=beside,
        )  # fmt: skip
        if cache.states.short is not None:
            logger.warning("accepted tokens go through recurrent layers again, because %s", cache.states.short)
    return cache


@torch.inference_mode()
def _probe(model: PreTrainedModel, experts: str) -> tuple[Facts, Float[Tensor, "batch position vocab"]]:
    """Run the model on its own, which shows what it keeps in a cache and which masks it makes."""
    config = model.config.get_text_config(decoder=True)
    output_layer = model.get_output_embeddings()
    assert output_layer is not None, "check_supported has refused the model"
    device = main_device(model)
    probe = ShapeProbe(getattr(config, "num_hidden_layers", 1), device)
    configs = configs_of(model)
    vocab_size = output_width(output_layer)
    training = [module for module in model.modules() if module.training]
    # In some versions SDPA ignores softcaps and sinks, so the model's own attention is the reference.
    with switched(configs, "eager", experts), noted_masks(configs) as asked, evaluating(training):
        tokens = trial_tokens(config, vocab_size, device)
        arguments = frozenset(inspect.signature(type(model).forward).parameters)
        cache_class, name = own_cache_class(model), cache_argument(arguments)

        def run(given: Tensor, cache: ShapeProbe) -> Any:
            return model(input_ids=given, **{name: of_class(cache, cache_class)}, use_cache=True)

        with Attributes(model) as attributes:
            output = run(tokens, probe)
            stateful = bool(probe.states.now or attributes.appeared(len(tokens)))
        mixers: tuple[Mixer, ...] = ()
        if stateful:
            tokens = trial_tokens(config, vocab_size, device, rows=ROWS, length=TOKENS)
            if tokens.shape[1] < TOKENS:
                raise UnsupportedError(f"recurrent layers are tried with {TOKENS} tokens, more than it has positions")
            probe_of_states = ShapeProbe(len(probe.layers), device)
            mixers = find_mixers(model, lambda: run(tokens, probe_of_states), probe_of_states.states)
    facts = Facts(
        model_type=model.config.model_type, experts=experts, reaches=reaches(config, asked), layers=probe.shapes,
        indexers=probe.indexers, vocab_size=vocab_size, dtype=model.dtype, device=device, mixers=mixers,
        keeps_logits="logits_to_keep" in arguments, arguments=arguments, cache_class=cache_class,
    )  # fmt: skip
    return facts, output.logits


def trial_tokens(
    config: PreTrainedConfig, vocab_size: int, device: torch.device, *, rows: int = 2, length: int = TRIAL_LENGTH
) -> Int[Tensor, "batch position"]:
    """Return rows of distinct tokens without the first ids, which may be special tokens."""
    length = min(length, position_limit(config) or length)
    ids = torch.arange(rows * length, device=device).view(rows, length)
    return (101 + 37 * ids) % min(vocab_size, config.vocab_size)


@torch.inference_mode()
def _trial(executor: Executor, own: Float[Tensor, "batch position vocab"]) -> float | None:
    """Try a ragged prefill, a single token, a branching tree and a token behind it over a small cache."""
    facts, device, config = executor.facts, executor.facts.device, executor.model.config.get_text_config(decoder=True)
    tokens = trial_tokens(config, facts.vocab_size, device)
    if tokens.shape[1] < TRIAL_LENGTH:
        return None
    cache = make_cache(facts, max_batch_size=2, max_length=TRIAL_LENGTH, max_nodes=TRIAL_SHAPE.num_nodes)
    slots, lengths, done = np.arange(2), np.array(TRIAL_PREFIXES), np.array((0, 0))
    index = torch.from_numpy(slots).to(device)
    for stop in (2, lengths.max() - 1):  # in two pieces, because a state may go on in another way than it begins
        piece, ends = tokens[:, done.max() : stop], np.minimum(lengths - 1, stop)
        host = {"host_slots": slots, "host_lengths": done, "host_counts": ends - done}
        executor.run(ForwardBatch.of_chunk(piece, **host), cache)
        done = ends

    def forward(given: Tensor, topology: Topology, after: Tensor) -> Tensor:
        batch = ForwardBatch(tokens=given, slots=index, lengths=after, topology=topology)
        return executor.run(batch, cache).scores

    chain, starts = Topology.chain(1, device), torch.from_numpy(lengths).to(device)
    path = starts[:, None] + torch.arange(-1, len(TRIAL_PATH), device=device)
    nodes = tokens[:, :1].repeat(1, TRIAL_SHAPE.num_nodes + 1)
    nodes[:, TRIAL_PATH] = tokens.gather(1, path[:, 1:])
    single = forward(tokens.gather(1, path[:, :1]), chain, starts - 1)
    cache.commit(index, starts - 1, path.new_empty(2, 0))
    tree = forward(nodes, Topology.of_shape(TRIAL_SHAPE, device), starts)
    # One row goes on behind the root and a node, the other behind the root alone.
    cache.commit(index, starts, torch.tensor([TRIAL_PATH[1:2], [-1]], device=device))
    again = starts[:, None] + torch.tensor([[2], [1]], device=device)
    second = forward(tokens.gather(1, again), chain, again[:, 0])
    logits, path = torch.cat([single, tree[:, TRIAL_PATH], second], dim=1), torch.cat([path, again], dim=1)
    if cache.length_used and not getattr(config, "attn_temperature_tuning", False):  # see check_length
        raise UnsupportedError("its layers count positions from the length of the cache, which a batch has not")
    wanted = own.gather(1, path[:, :, None].expand(-1, -1, own.shape[2]))
    rounded = getattr(executor.model, "is_quantized", False) or rounded_to(executor.model) is not None
    precise = facts.dtype in (torch.float32, torch.float64) and not rounded
    return differs(logits, wanted, precise=precise)


@contextmanager
def noted_masks(configs: list[PreTrainedConfig]) -> Iterator[set[int | None]]:
    """Note the window of every mask that a model makes for itself by transformers' functions.

    The functions are the process's, so one thread looks at a time, and only at its own calls.
    """
    asked, here = set[int | None](), threading.get_ident()
    names = {config._attn_implementation for config in configs} & set(ALL_MASK_ATTENTION_FUNCTIONS)

    def noting(function: Any) -> Any:
        def make_mask(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                asked.add(kwargs.get("local_size"))
            return function(*args, **kwargs)

        return make_mask

    with _looking:
        functions = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in names}
        for name, function in functions.items():
            ALL_MASK_ATTENTION_FUNCTIONS[name] = noting(function)
        try:
            yield asked
        finally:
            for name in functions:
                del ALL_MASK_ATTENTION_FUNCTIONS[name]


_looking = threading.Lock()


def differs(
    logits: Float[Tensor, "batch node vocab"], own: Float[Tensor, "batch node vocab"], *, precise: bool
) -> float | None:
    """Return how far logits are from the model's own, relative to their spread; None if within rounding.

    In single precision the worst position counts. In half precision the median position does, because a token may be
    routed to another expert without a fault.
    """
    logits, own = logits.double(), own.double()
    usable = torch.isfinite(own)  # padded vocabularies may be at -inf, and broken weights are found while decoding
    error = torch.where(usable, logits - own, 0.0).norm(dim=-1)
    own = torch.where(usable, own, 0.0)
    mean = own.sum(-1, keepdim=True) / usable.sum(-1, keepdim=True).clamp(min=1)
    spread = torch.where(usable, own - mean, 0.0).norm(dim=-1)
    relative = error / spread.clamp(min=1e-3 * own.norm(dim=-1)).clamp(min=1e-6)
    worst = float(relative.max() if precise else relative.median())
    # Written so that NaN differs.
    return None if worst <= (TOLERANCE if precise else HALF_TOLERANCE) else worst


def explain(model: PreTrainedModel, finding: str) -> str:
    """Return why a model failed its trial, in one sentence that names its type."""
    parameters = inspect.signature(type(model).forward).parameters
    names = {name for part in {type(part) for part in model.modules()} for name in dir(part)}
    stateful, forward = model._is_stateful, f"{type(model).__name__}.forward"
    decoder = getattr(model.config.get_text_config(decoder=True), "is_decoder", None)
    reasons = {
        "its states are in one object that goes through the whole model, and cannot be had node by node": (
            "state" in parameters or (stateful and "ShapeProbe" in finding)
        ),
        ALIBI: any("alibi" in name for name in names),
        "it numbers positions from its padding token's id on, not from 0; not supported": (
            "create_position_ids_from_input_ids" in names
        ),
        f"its attention is bidirectional unless its configuration has is_decoder=True ({finding})": decoder is False,
        f"{forward} takes no cache (past_key_values); not supported": cache_argument(parameters) not in parameters,
        f"{forward} takes no position_ids, so that a tree's tokens cannot be placed; not supported": (
            "position_ids" not in parameters and not stateful
        ),
        f"not supported, because a trial forward over the KV cache failed: {finding}": True,
    }
    return f"{model.config.model_type}: {next(reason for reason, holds in reasons.items() if holds)}"
