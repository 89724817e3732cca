"""A target whose next token is known from the last one and from what was said before, and heads that know it, too.

The target's hidden state has three parts: a constant channel, a code of the last token, and a memory: the mean of what
all tokens before have left there. Every layer turns the memory, so that it reads otherwise in each of them. The memory
makes tokens like those before more probable, so that texts differ and go on as they began. All of this is linear up to
the norms, which change next to nothing, so that heads need no training: their weights are solved for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters import BlockHead, MedusaHeads
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.mtp import MTPHead
from specdec.cache.transformers_cache import CACHE
from specdec.target.target import Target

VOCAB, WIDTH, CODE, MEMORY, LAYERS = 64, 48, slice(1, 25), slice(25, 48), 8
MASK = VOCAB - 1
"""A token that no text has, and that says nothing of the next one."""
FEATURES = (2, 4, 5)
"""The hidden states that heads read which read several."""
THETA = 50.0
"""The target's RoPE: it turns so fast that a token can be told from its neighbours."""


def unit_rms(states: Tensor) -> Tensor:
    """States divided by their root mean square."""
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)


def toy_model(seed: int = 0) -> LlamaForCausalLM:
    """The target."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, head_dim=12, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        parameter.data.zero_() if parameter.ndim > 1 else parameter.data.fill_(1.0)
    codes = unit_rms(torch.randn(VOCAB, 24))
    codes[MASK] = 0
    left = torch.randn(23, 24) * 24**-0.5
    model.model.embed_tokens.weight.data[:, 0] = 4.0
    model.model.embed_tokens.weight.data[:, CODE] = codes
    turned = torch.eye(23)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.v_proj.weight.data.copy_(torch.eye(WIDTH))
        out = layer.self_attn.o_proj.weight.data
        if number == 0:
            out[MEMORY, CODE] = left * 2
        else:
            turn = torch.randn(23, 23) * 23**-0.5
            turn = turn - turn.T  # such a one plus the identity can be undone
            out[MEMORY, MEMORY] = turn
            turned = (torch.eye(23) + turn) @ turned
    model.model.norm.weight.data.copy_(0.3 + 2 * torch.rand(WIDTH))
    follower = torch.randperm(MASK)
    output = model.lm_head.weight.data
    output[follower, CODE] = codes[:MASK] * 0.75
    output[MASK, 0] = -20
    output[:, MEMORY] = (codes @ left.T) @ torch.linalg.pinv(turned) * 4
    return model


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """A word per token."""
    words = {**{f"w{token}": token for token in range(MASK)}, "[MASK]": MASK}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]")


def toy_target(seed: int = 0) -> Target:
    return Target(toy_model(seed), name=f"toy {seed}")


@torch.no_grad()
def toy_text(model: LlamaForCausalLM, rows: int = 32, length: int = 64, seed: int = 1) -> Tensor:
    """Text of the model's own."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(MASK, (rows, 1), generator=generator)
    cache: Any = None
    for _ in range(length - 1):
        output = model(found[:, -1:], **{CACHE: cache}, use_cache=True)
        cache = output[CACHE]
        found = torch.cat([found, torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)], 1)
    return found


class Seen:
    """States of the toy over text of its own, from which heads are solved for.

    Attributes:
        tokens: Text.
        hidden: By layer, its input; the number of layers is the last one's output before the norm, -1 the same after.
    """

    @torch.no_grad()
    def __init__(self, model: LlamaForCausalLM, seed: int = 1):
        self.model, self.tokens = model, toy_text(model, seed=seed)
        norm: Any = model.model.norm
        kept: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        output = model(self.tokens, output_hidden_states=True)
        hook.remove()
        states = output.hidden_states
        self.hidden = {**{layer: states[layer] for layer in range(LAYERS)}, LAYERS: kept[-1], -1: states[-1]}
        self.logits = output.logits

    def embedded(self, shift: int) -> Tensor:
        """The embeddings of tokens that stand ``shift`` further on, for all positions that have two after them."""
        ends = self.tokens.shape[1] - 2 + shift
        return self.model.model.embed_tokens(self.tokens[:, 3 + shift : ends]).flatten(0, 1).detach()

    def state(self, layer: int, shift: int = 0) -> Tensor:
        ends = self.tokens.shape[1] - 2 + shift
        return self.hidden[layer][:, 3 + shift : ends].flatten(0, 1)

    def solved(self, inputs: Sequence[Tensor], wanted: Tensor) -> list[Tensor]:
        """The matrices that make, of each of some inputs, a part of what is wanted."""
        joined = torch.cat(list(inputs), 1).double()
        ridge = 1e-4 * len(joined) * torch.eye(joined.shape[1], dtype=torch.double)
        found = torch.linalg.solve(joined.T @ joined + ridge, joined.T @ wanted.double()).float()
        return list(found.T.split([each.shape[1] for each in inputs], dim=1))


def _cleared(head: Any) -> Any:
    """A head whose attention and MLP add nothing."""
    for name, parameter in head.named_parameters():
        if "layers" in name and ("o_proj" in name or "down_proj" in name):
            parameter.data.zero_()
    return head.eval()


def toy_eagle(seen: Seen) -> EagleHead:
    """EAGLE-1's head."""
    head = _cleared(EagleHead.for_target(seen.model, fusion_bias=False))
    parts = seen.solved([seen.embedded(1), seen.state(-1)], seen.state(-1, 1))
    head.model.fc.weight.data.copy_(torch.cat(parts, 1))
    return head


def toy_mtp(seen: Seen) -> MTPHead:
    """An MTP module."""
    model: Any = seen.model
    head = _cleared(MTPHead.for_target(model, before_norm=False))
    head.model.norm.weight.data.copy_(model.model.norm.weight)
    wanted = unit_rms(seen.state(LAYERS, 1))
    parts = seen.solved([unit_rms(seen.embedded(1)), unit_rms(seen.state(-1))], wanted)
    head.model.proj.weight.data.copy_(torch.cat(parts, 1))
    return head


def toy_eagle3(seen: Seen) -> Eagle3Head:
    """EAGLE-3's head. Its attention looks at its own pair alone, which it finds by the turn of RoPE."""
    model: Any = seen.model
    head: Any = _cleared(Eagle3Head.for_target(model, hidden_layers=FEATURES))
    head.lm_head.weight.data.copy_(model.lm_head.weight)
    head.model.norm.weight.data.copy_(model.model.norm.weight)
    states = [seen.state(layer) for layer in FEATURES]
    wanted = 3 * unit_rms(seen.state(LAYERS, 1))  # thrice what a norm would make of it
    embedding, *features = seen.solved([unit_rms(seen.embedded(1)), *states], wanted)
    head.model.fusion.linear.weight.data.copy_(torch.cat(features, 1))
    attention: Any = head.model.layers[0].self_attn
    # The constant channel as query and key, in two of a head's six pairs: the first turns so fast that it tells
    # neighbours apart, and the second so slowly that nothing further back looks like the token itself.
    for part in (attention.q_proj, attention.k_proj):
        part.weight.data.zero_()[1::12, 0] = 2.5
        part.weight.data[3::12, 0] = 2.5
    attention.v_proj.weight.data.zero_()[:, :WIDTH] = embedding
    attention.o_proj.weight.data.copy_(torch.eye(WIDTH))
    head.config.rope_parameters = {"rope_type": "default", "rope_theta": THETA}
    head.model.rotary_emb = type(head.model.rotary_emb)(head.config)
    return head


def toy_medusa(seen: Seen, heads: int = 2, *, first: int = 2) -> MedusaHeads:
    """Medusa heads, the first of which predicts the token that stands ``first`` further on."""
    found: Any = MedusaHeads(num_heads=heads, hidden_size=WIDTH, vocab_size=VOCAB)
    for number, head in enumerate(found.heads):
        shift = number + first - 1
        wanted = seen.logits[:, 3 + shift : seen.tokens.shape[1] - 2 + shift].flatten(0, 1)
        (matrix,) = seen.solved([seen.state(-1)], wanted)
        head[-1].weight.data.copy_(matrix)
    return found.eval()


def toy_block(seen: Seen) -> BlockHead:
    """A block drafter's head: a place knows the memory, and a Markov head what follows the token before it."""
    model: Any = seen.model
    settings = {"layers": 1, "block_size": 4, "mask_token_id": MASK, "layer_kind": "llama", "markov_rank": WIDTH}
    head: Any = _cleared(BlockHead.for_target(model, hidden_layers=FEATURES, **settings))
    memory = seen.state(LAYERS)
    kept = torch.zeros_like(memory)
    kept[:, MEMORY] = memory[:, MEMORY]
    head.fc.weight.data.copy_(torch.cat(seen.solved([seen.state(layer) for layer in FEATURES], kept), 1))
    attention: Any = head.layers[0].self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        part.weight.data.zero_()
    attention.o_proj.weight.data.copy_(torch.eye(WIDTH))
    # The mask token's constant channel stands for the code that a place lacks, so that the last norm scales alike.
    size, constant = memory.pow(2).mean().sqrt(), memory[:, 0].pow(2).mean()
    factor = float((constant / (constant + memory[:, CODE].pow(2).sum(1).mean())).sqrt())
    scale = factor * float(kept.pow(2).mean().sqrt())
    attention.v_proj.weight.data[MEMORY, MEMORY] = torch.eye(23) * scale
    norm = model.model.norm.weight
    head.norm.weight.data.copy_(norm)
    head.markov_head.markov_w1.weight.data.copy_(model.model.embed_tokens.weight)
    head.markov_head.markov_w2.weight.data.zero_()
    head.markov_head.markov_w2.weight.data[:, CODE] = (model.lm_head.weight * norm)[:, CODE] / size
    return head
