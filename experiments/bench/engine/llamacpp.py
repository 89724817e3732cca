"""llama.cpp on the same random weights, through llama-cpp-python, where it and ``gguf`` are installed."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.bench.engine.rounds import WARM_UP, Rounds, advance, begin
from experiments.bench.engine.settings import Options
from experiments.bench.engine.steps import CAPTURED, Setting, make_runner, measure_step
from experiments.bench.models import BUNDLED, make_target, repetitive
from experiments.bench.timing import Budget, timed
from experiments.measuring.forwards import captured_at_once
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target

NODES = (1, 5, 9, 16)
"""Tokens per forward."""


def why_not(target: Target, name: str) -> str | None:
    """Return why llama.cpp cannot be a peer here; None if it can."""
    missing = [package for package in ("llama_cpp", "gguf") if importlib.util.find_spec(package) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install llama-cpp-python gguf"
    if target.device.type != "cpu":
        return "it is a peer on CPUs only"
    return "the bundled model is not written as GGUF: take a random shape" if name == BUNDLED else None


def measure_llama_cpp(
    target: Target, name: str, context: int, options: Options, budget: Budget
) -> list[dict[str, Any]]:
    """Time forwards and whole tokens of llama.cpp and of this engine, in turn, at every precision that both have.

    Returns:
        A record per precision and number of tokens: seconds of both, and ``ratio``, ours over theirs. ``nodes`` is 0
        for a whole plain token with everything around its forward.
    """
    full = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[target.dtype]
    pairs = [(full, None), ("Q8_0", "int8"), ("Q4_0", "int4")]
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for theirs, ours in pairs:
            what = f"llama.cpp in {theirs}"
            if budget.left < 5:
                budget.skip(what, "no time left")
                continue
            try:
                made = target if ours is None else make_target(name, target.device, target.dtype, quantization=ours)
                records += _compared(target, made, theirs, Path(folder), context, options)
            except Exception as error:  # whatever fails in another engine is a line in the table
                budget.skip(what, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    return records


def _compared(
    target: Target, made: Target, precision: str, folder: Path, context: int, options: Options
) -> list[dict[str, Any]]:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    path = write_gguf(target, folder / f"{precision}.gguf", precision)
    threads = torch.get_num_threads()
    llama = Llama(
        str(path), n_ctx=context + options.tokens + 64, n_threads=threads, n_threads_batch=threads, logits_all=True,
        verbose=False,
    )  # fmt: skip
    prompt = repetitive(context, target.vocab_size)
    llama.eval(prompt)
    agrees = bool(np.argmax(llama.scores[context - 1]) == _first_token(target, prompt))
    device = target.device
    records = []

    def evaluate(tokens: int) -> None:
        llama.n_tokens = context  # what was added is dropped: every call begins behind the same prefix
        llama.eval(prompt[:tokens])

    for nodes in NODES:
        runner = make_runner(made, Setting(1, nodes, context), nodes)
        before = timed(lambda n=nodes: evaluate(n), device, repeats=2 * options.repeats, limit=2.0)
        ours = measure_step(runner, Setting(1, nodes, context), repeats=options.repeats, limit=2.0)
        after = timed(lambda n=nodes: evaluate(n), device, repeats=2 * options.repeats, limit=2.0)
        theirs = min(before.seconds, after.seconds)
        records.append(_record(precision, nodes, ours["seconds"], theirs, agrees))

    def token() -> None:
        evaluate(1)
        int(np.argmax(llama.scores[llama.n_tokens - 1]))

    theirs = timed(token, device, repeats=4 * options.repeats, limit=3.0).seconds
    engine = Engine(made, max_length=context + WARM_UP + options.tokens + 1)
    sampling = SamplingParams(max_new_tokens=WARM_UP + options.tokens, ignore_eos=True)
    with captured_at_once(CAPTURED):
        begin(engine, [prompt], sampling)
        advance(engine, device, Rounds(), most=WARM_UP)
        walls = advance(engine, device, Rounds()).walls
    records.append(_record(precision, 0, float(np.median(walls)), theirs, agrees))
    llama.close()
    return records


def _record(precision: str, nodes: int, ours: float, theirs: float, agrees: bool) -> dict[str, Any]:
    return {
        "precision": precision, "nodes": nodes, "ours": ours, "theirs": theirs, "ratio": ours / theirs,
        "same_token": agrees,
    }  # fmt: skip


@torch.inference_mode()
def _first_token(target: Target, prompt: list[int]) -> int:
    return int(target.model(torch.tensor([prompt])).logits[0, -1].argmax())


def write_gguf(target: Target, path: Path, precision: str) -> Path:
    """Write a Llama's weights, without a tokenizer, for llama.cpp.

    Args:
        target: An unquantized Llama.
        path: The file.
        precision: How the matrices are stored, by ggml's name: F32, F16, BF16, Q8_0, Q4_0.
    """
    import gguf  # pyright: ignore[reportMissingImports]
    from gguf import quants  # pyright: ignore[reportMissingImports]

    config, state = target.model.config, target.model.state_dict()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[precision]

    def add(name: str, source: str, rotary_heads: int = 0) -> None:
        array = state[source].float().numpy()
        if rotary_heads:
            # transformers rotates the halves of a head against each other, ggml neighbours.
            parts = array.reshape(rotary_heads, 2, width // 2, array.shape[1])
            array = parts.swapaxes(1, 2).reshape(array.shape)
        of = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, quants.quantize(np.ascontiguousarray(array), of), raw_dtype=of)

    add("token_embd.weight", "model.embed_tokens.weight")
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        add(f"{theirs}.attn_q.weight", f"{ours}.self_attn.q_proj.weight", heads)
        add(f"{theirs}.attn_k.weight", f"{ours}.self_attn.k_proj.weight", kv_heads)
        add(f"{theirs}.attn_v.weight", f"{ours}.self_attn.v_proj.weight")
        add(f"{theirs}.attn_output.weight", f"{ours}.self_attn.o_proj.weight")
        add(f"{theirs}.ffn_gate.weight", f"{ours}.mlp.gate_proj.weight")
        add(f"{theirs}.ffn_up.weight", f"{ours}.mlp.up_proj.weight")
        add(f"{theirs}.ffn_down.weight", f"{ours}.mlp.down_proj.weight")
        add(f"{theirs}.attn_norm.weight", f"{ours}.input_layernorm.weight")
        add(f"{theirs}.ffn_norm.weight", f"{ours}.post_attention_layernorm.weight")
    add("output_norm.weight", "model.norm.weight")
    if not config.tie_word_embeddings:
        add("output.weight", "lm_head.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
