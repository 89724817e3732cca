"""A trained Llama model widened to a larger shape, computing the same function at the larger shape's cost.

The speed of speculative decoding depends on two things: how often drafts are accepted, which needs trained weights,
and what a forward costs, which needs a large model. An inflated model has both, without the large model's weights: its
logits, and so every acceptance, are the small model's, up to rounding. It cannot tell how drafts would be accepted by a
trained model of the larger size. So the target's name says in all results that it is inflated.

What keeps the function the same:

* The old residual channels come first and the new ones are zero everywhere: the embedding writes nothing into them,
  nor does any layer. What reads them is random.
* RMSNorm divides by the mean square over *all* channels, but only H of the H' channels carry signal. Its weights are
  multiplied by sqrt(H / H') and its epsilon by H / H' to make up for that. If H' / H is a power of four, the factor is
  a power of two, and bfloat16 adds no rounding.
* Wider heads keep the old rotary frequencies: frequency i of a head of width d is theta^(-2i / d), which is
  frequency m * i of a head of width m * d. The keys of the frequencies between are zero. The queries are multiplied by
  sqrt(m), because the wider head scales its scores by (m d)^-1/2.
* New heads, channels of the MLP and layers compute with random weights, and the layer that would add their result to
  the residual stream has zeros for them.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec.llama_shapes import LlamaShape, shape_of

_INDEPENDENT_ROPE = ("default", "linear", "llama3")  # scale each frequency by itself, whatever its index


def inflate(
    model: PreTrainedModel, shape: str | Mapping[str, int] | LlamaShape | LlamaConfig, *, seed: int = 0
) -> LlamaForCausalLM:
    """Returns a widened Llama model with the same logits up to rounding, in the same dtype and on the same device.

    The first channels of its hidden states are those of the given model, which is not changed.

    Args:
        shape: ``"110m"``, ``"1b"``, ``"8b"``, or the numbers of a ``LlamaShape``; none may be smaller than the model's.
        seed: The seed of the random weights.

    Raises:
        ValueError: It is quantized or no Llama model, or it does not fit into the shape; says what does not fit.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"inflate: only Llama models can be inflated, and this is a {model.config.model_type} model")
    first: Any = model.model.layers[0]
    if not first.self_attn.q_proj.weight.is_floating_point():
        raise ValueError("inflate: the model is quantized; inflate it first and quantize the result")
    goal = resolve_shape(shape)
    _check(model.config, goal, describe(shape))
    config = copy.deepcopy(model.config)
    for name, value in asdict(goal).items():
        setattr(config, name, value)
    config.rms_norm_eps = model.config.rms_norm_eps * model.config.hidden_size / goal.hidden_size
    config.inflated_from = resolve_shape(model.config).hidden_size  # whose channels carry the signal
    config.name_or_path = f"{config.name_or_path} inflated to {describe(shape)}".strip()  # a Target's name by default
    with torch.device("meta"):  # every tensor is given below: allocating and initializing another would double the time
        larger = LlamaForCausalLM(config)
    state = dict(_weights(model, goal, torch.Generator(device=model.device).manual_seed(seed)))
    larger.load_state_dict(state, strict=not config.tie_word_embeddings, assign=True)
    larger.tie_weights()
    larger.model.rotary_emb = type(larger.model.rotary_emb)(config).to(model.device)  # its frequencies are no weights
    larger.generation_config = copy.deepcopy(model.generation_config)
    return larger.eval()


def signal_width(model: PreTrainedModel) -> int:
    """Returns how many channels of the last hidden state carry signal: all, except in an inflated model."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "inflated_from", config.hidden_size)


def resolve_shape(shape: str | Mapping[str, int] | LlamaShape | LlamaConfig) -> LlamaShape:
    """Returns a shape given by name, by its numbers, or by a configuration, of which only these numbers are read."""
    if isinstance(shape, LlamaConfig):
        return LlamaShape(**{field.name: getattr(shape, field.name) for field in fields(LlamaShape)})
    return shape_of(shape)


def describe(shape: str | Mapping[str, int] | LlamaShape | LlamaConfig) -> str:
    """Returns a shape in a few words, for names and messages."""
    if isinstance(shape, str):
        return shape
    goal = resolve_shape(shape)
    return f"width {goal.hidden_size} and {goal.num_hidden_layers} layers"


def place_heads(heads: int, kv_heads: int, new_heads: int, new_kv_heads: int) -> tuple[list[int], list[int]] | None:
    """Returns where old query heads go so that each still reads its own keys and values.

    Query head j reads key-value head j // (heads / kv_heads). If new groups are larger than the old ones, some of their
    query heads are new. If they are smaller, old key-value heads are copied. For example, four heads, two of which
    share a key-value head, go into twelve that have one each::

        query head           0  1  2  3           goes to  0  1  2  3
        its key-value head   0  0  1  1           copied to  0  1 (from 0)  2  3 (from 1)

    Returns:
        The new index of every old query head, and which old key-value head each of the first new ones carries; None if
        there are too few new key-value heads.
    """
    group, new_group = heads // kv_heads, new_heads // new_kv_heads
    copies = -(-group // new_group)
    if kv_heads * copies > new_kv_heads:
        return None
    carried = [head for head in range(kv_heads) for _ in range(copies)]
    queries = []
    for head in range(heads):
        first, rank = head // group * copies, head % group
        queries.append((first + rank // new_group) * new_group + rank % new_group)
    return queries, carried


def _check(config: LlamaConfig, goal: LlamaShape, label: str) -> None:
    """Refuse what cannot be done exactly."""
    own, kind = resolve_shape(config), (config.rope_parameters or {}).get("rope_type", "default")
    heads, kv_heads = goal.num_attention_heads, goal.num_key_value_heads
    sizes = {name: (size, getattr(goal, name)) for name, size in asdict(own).items() if name != "num_key_value_heads"}
    if small := [name for name, (size, larger) in sizes.items() if larger < size]:
        size, larger = sizes[small[0]]
        wrong = f"the model's {small[0]} is {size}, which does not fit into {larger}"
    elif heads % kv_heads or goal.hidden_size % heads:
        wrong = "num_key_value_heads must divide num_attention_heads, and these must divide hidden_size"
    elif goal.head_dim % own.head_dim:
        wrong = (
            f"heads of width {own.head_dim} keep their rotary frequencies in multiples of it, not in {goal.head_dim}"
        )
    elif goal.head_dim != own.head_dim and kind not in _INDEPENDENT_ROPE:
        wrong = f"the {kind} RoPE depends on the head's width; give a shape with head_dim {own.head_dim}"
    elif _placed(own, goal) is None:
        few = f"{own.num_attention_heads} heads that share {own.num_key_value_heads} do not fit into {heads} heads"
        wrong = f"{few} with {kv_heads}: give the shape more key-value heads"
    else:
        return
    raise ValueError(f"inflate to {label}: {wrong}")


def _placed(own: LlamaShape, goal: LlamaShape) -> tuple[list[int], list[int]] | None:
    return place_heads(
        own.num_attention_heads, own.num_key_value_heads, goal.num_attention_heads, goal.num_key_value_heads
    )


@dataclass(frozen=True)
class _Place:
    """Where a projection's weight goes inside the larger one, multiplied by a factor.

    Attributes:
        size: (out, in) of the larger weight.
        rows: Rows of the larger weight that get the old rows, in the order of ``source``.
        columns: Columns that get the old columns.
        source: The old rows, each as often as it is needed; None for all in their order.
        cleared: Rows whose old channels are set to zero before the old weights are written; None for ``rows`` alone.
        random: Whether the rest is random; it is zero otherwise.
    """

    size: tuple[int, int]
    rows: Int[Tensor, " row"]
    columns: Int[Tensor, " column"]
    source: Int[Tensor, " row"] | None = None
    cleared: Int[Tensor, " cleared"] | None = None
    random: bool = True
    factor: float = 1.0

    def fill(self, larger: Tensor, old: Tensor | None) -> Tensor:
        """Returns the larger weight (or bias) with the old one written into it; a new layer has no old one."""
        if old is None:
            return larger
        old = old.detach() if self.source is None else old.detach()[self.source.to(old.device)]
        old = (old.float() * self.factor).to(old.dtype)
        rows, columns = self.rows.to(old.device), self.columns.to(old.device)
        cleared = rows if self.cleared is None else self.cleared.to(old.device)
        shape, across = ((-1,), ()) if old.ndim == 1 else ((-1, 1), (columns,))  # a bias has rows alone
        larger[(cleared.view(shape), *across)] = 0
        larger[(rows.view(shape), *across)] = old
        return larger


def _places(own: LlamaShape, goal: LlamaShape) -> dict[str, _Place]:
    """Returns the places of a layer's projections, by the module's name."""
    placed = _placed(own, goal)
    assert placed is not None, "checked before"
    queries, carried = placed
    width, used = goal.head_dim, list(range(len(carried)))
    rotary = rotary_places(own.head_dim, width)
    first = torch.arange(own.head_dim)  # values have no frequencies: any channels will do
    channels, inner = torch.arange(own.hidden_size), torch.arange(own.intermediate_size)
    all_queries, all_keys = goal.num_attention_heads * width, goal.num_key_value_heads * width
    hidden, sharper, cleared = goal.hidden_size, (width / own.head_dim) ** 0.5, _rows(used, torch.arange(width), width)
    old_keys = _rows(carried, first, own.head_dim)
    values = _Place((all_keys, hidden), _rows(used, first, width), channels, source=old_keys)
    into = _Place((goal.intermediate_size, hidden), inner, channels)
    return {
        "self_attn.q_proj": _Place((all_queries, hidden), _rows(queries, rotary, width), channels, factor=sharper),
        "self_attn.k_proj": replace(values, rows=_rows(used, rotary, width), cleared=cleared),
        "self_attn.v_proj": values,
        "self_attn.o_proj": _Place((hidden, all_queries), channels, _rows(queries, first, width), random=False),
        "mlp.gate_proj": into,
        "mlp.up_proj": into,
        "mlp.down_proj": _Place((hidden, goal.intermediate_size), channels, inner, random=False),
    }


def _weights(model: LlamaForCausalLM, goal: LlamaShape, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight of the larger model with its name."""
    config, table = model.config, model.model.embed_tokens.weight
    places = _places(resolve_shape(config), goal)
    vocab, channels = torch.arange(table.shape[0]), torch.arange(config.hidden_size)
    norm_factor = (config.hidden_size / goal.hidden_size) ** 0.5

    def empty(place: _Place, *size: int) -> Tensor:
        larger = torch.zeros(size, dtype=table.dtype, device=table.device)
        return larger.normal_(0.0, config.initializer_range, generator=generator) if place.random else larger

    def norm(weight: Tensor | None) -> Tensor:
        # The weights of new channels and new layers do not matter: 1.
        larger = torch.ones(goal.hidden_size, dtype=table.dtype, device=table.device)
        if weight is not None:
            larger[: len(weight)] = weight.detach().float() * norm_factor
        return larger

    words = _Place((len(vocab), goal.hidden_size), vocab, channels, random=False)
    yield "model.embed_tokens.weight", words.fill(empty(words, *words.size), table)
    yield "model.norm.weight", norm(model.model.norm.weight)
    if not config.tie_word_embeddings:
        head = replace(words, random=True)
        yield "lm_head.weight", head.fill(empty(head, *head.size), model.lm_head.weight)
    for index in range(goal.num_hidden_layers):
        old = model.model.layers[index] if index < config.num_hidden_layers else None
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{index}.{name}.weight", norm(None if old is None else getattr(old, name).weight)
        for name, place in places.items():
            module: Any = None if old is None else old.get_submodule(name)
            weight, bias = (getattr(module, part, None) for part in ("weight", "bias"))
            yield f"model.layers.{index}.{name}.weight", place.fill(empty(place, *place.size), weight)
            if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
                yield f"model.layers.{index}.{name}.bias", place.fill(empty(place, place.size[0]), bias)


def rotary_places(head_dim: int, new_head_dim: int) -> Int[Tensor, " head_dim"]:
    """Returns where a head's channels go in a wider head so that each keeps its rotary frequency.

    Channels i and i + d/2 of a head of width d turn with frequency i. Width 4 into width 8::

        old channel      0  1  2  3
        its frequency    0  1  0  1
        its place        0  2  4  6
    """
    half = torch.arange(head_dim // 2) * (new_head_dim // head_dim)
    return torch.cat([half, half + new_head_dim // 2])


def _rows(heads: list[int], channels: Int[Tensor, " channel"], width: int) -> Int[Tensor, " row"]:
    """Returns the rows of some channels of some heads, in a projection to heads of ``width`` channels."""
    return (torch.tensor(heads)[:, None] * width + channels).flatten()
