"""llama.cpp on the same random weights, through llama-cpp-python, where it and ``gguf`` are installed."""

import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from drafters.round_costs import begin
from experiments.bench.engine.rounds import WARM_UP, play
from experiments.bench.engine.settings import Options
from experiments.bench.engine.steps import CAPTURED, Record, Setting, make_runner, measure_step
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


def measure_llama_cpp(target: Target, name: str, context: int, options: Options, budget: Budget) -> list[Record]:
    """Time forwards and whole tokens of llama.cpp and of this engine, in turn, at every precision that both have.

    Returns:
        A record per precision and number of tokens: seconds of both, and ``ratio``, ours over theirs. ``nodes`` is 0
        for a whole plain token with everything around its forward.
    """
    full = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[target.dtype]
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        for theirs, ours in ((full, None), ("Q8_0", "int8"), ("Q4_0", "int4")):
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
) -> list[Record]:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    path = write_gguf(target, folder / f"{precision}.gguf", precision)
    threads, device = torch.get_num_threads(), target.device
    llama = Llama(
        str(path), n_ctx=context + options.tokens + 64, n_threads=threads, n_threads_batch=threads, logits_all=True,
        verbose=False,
    )  # fmt: skip
    prompt = repetitive(context, target.vocab_size)
    llama.eval(prompt)
    with torch.inference_mode():
        first = int(target.model(torch.tensor([prompt])).logits[0, -1].argmax())
    agrees = bool(np.argmax(llama.scores[context - 1]) == first)

    def record(nodes: int, ours: float, theirs: float) -> Record:
        figures = {"ours": ours, "theirs": theirs, "ratio": ours / theirs}
        return {"precision": precision, "nodes": nodes, **figures, "same_token": agrees}

    def evaluate(tokens: int) -> None:
        llama.n_tokens = context  # what was added is dropped: every call begins behind the same prefix
        llama.eval(prompt[:tokens])

    def token() -> None:
        evaluate(1)
        int(np.argmax(llama.scores[llama.n_tokens - 1]))

    records = []
    for nodes in NODES:
        setting = Setting(1, nodes, context)
        runner = make_runner(made, setting, nodes)
        forward = partial(timed, partial(evaluate, nodes), device, repeats=2 * options.repeats, limit=2.0)
        before = forward()["seconds"]
        ours = measure_step(runner, setting, repeats=options.repeats, limit=2.0)["seconds"]
        theirs = min(before, forward()["seconds"])
        records.append(record(nodes, ours, theirs))
    whole = timed(token, device, repeats=4 * options.repeats, limit=3.0)["seconds"]
    engine = Engine(made, max_length=context + WARM_UP + options.tokens + 1)
    sampling = SamplingParams(max_new_tokens=WARM_UP + options.tokens, ignore_eos=True)
    with captured_at_once(CAPTURED):
        begin(engine, [prompt], [sampling])
        play(engine, most=WARM_UP)
        records.append(record(0, median(each["seconds"] for each in play(engine)), whole))
    llama.close()
    return records


_MATRICES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""The names of a layer's weights in ggml, and in transformers."""


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
    width = config.hidden_size // config.num_attention_heads
    rotary = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[precision]
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {} if config.tie_word_embeddings else {"output": "lm_head"}
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}" for theirs, ours in _MATRICES.items()}
    for name, source in names.items():
        array = state[f"{source}.weight"].float().numpy()
        if heads := rotary.get(name.rpartition(".")[2]):
            # transformers rotates the halves of a head against each other, ggml neighbours.
            parts = array.reshape(heads, 2, width // 2, array.shape[1])
            array = parts.swapaxes(1, 2).reshape(array.shape)
        of = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", quants.quantize(np.ascontiguousarray(array), of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
