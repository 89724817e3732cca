"""llama.cpp in its own environment, through llama-cpp-python, and a Llama's weights as it reads them."""

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

_MATRICES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""The names of a layer's weights in ggml, and in transformers."""


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load a model as ``given`` says; return versions and threads, and what decodes a batch of one prompt."""
    import llama_cpp  # pyright: ignore[reportMissingImports]
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # pyright: ignore[reportMissingImports]

    path, threads = converted(Path(given["model"]), given["precision"]), given["threads"]
    # Prompt lookup compares as many last tokens as ours does.
    draft = LlamaPromptLookupDecoding(4, given["num_tokens"]) if given["num_tokens"] else None
    kept = llama_cpp.GGML_TYPE_F32 if given["precision"] == "F32" else None
    llama = llama_cpp.Llama(
        str(path), n_ctx=given["max_length"], n_threads=threads, n_threads_batch=threads, draft_model=draft,
        type_k=kept, type_v=kept, verbose=False,
    )  # fmt: skip
    forward, rounds = llama.eval, []

    def counted(tokens: list[int]) -> None:
        rounds.append(0)
        forward(tokens)

    llama.eval = counted

    def decode(asked: dict[str, Any]) -> dict[str, Any]:
        (prompt,), (seed,), sampling = asked["prompts"], asked["seeds"], asked["sampling"]
        rounds.clear()
        llama.reset()  # else what the prompt before has in common with this one would not be computed
        llama.set_seed(seed)
        tokens: list[int] = []
        made = llama.generate(
            prompt, temp=sampling["temperature"], top_k=sampling.get("top_k", 0), top_p=sampling.get("top_p", 1.0),
            min_p=sampling.get("min_p", 0.0),
        )  # fmt: skip
        while len(tokens) < asked["max_new_tokens"] and not (tokens and tokens[-1] in asked["ends"]):
            tokens.append(next(made))
            rounds[-1] += 1
        token, place = tokens[-1], len(prompt) + len(tokens) - 1
        while place < llama.n_tokens and token == llama.input_ids[place]:  # the last round before it was cut
            token, place = next(made), place + 1
            rounds[-1] += 1
        return {"rows": [{"token_ids": tokens, "rounds": rounds}]}

    versions = {"llama-cpp-python": version("llama-cpp-python")}
    return {"versions": versions, "threads": llama.context_params.n_threads}, decode


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the weights by name of a model in transformers' layout."""
    from safetensors.numpy import load_file

    weights: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return json.loads((folder / "config.json").read_text()), weights


def head_width(config: Mapping[str, Any]) -> int:
    """The width of a head of a Llama. Raises ValueError: the model is none, or one that is not written yet."""
    rope = config["rope_parameters"]["rope_type"]
    if config["model_type"] != "llama" or rope != "default" or config["attention_bias"]:
        raise ValueError("only Llama models with plain rotary embeddings and without biases are written anew")
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def converted(folder: Path, precision: str, *, spelled: bool = False) -> Path:
    """Write the weights of a Llama in transformers' layout for llama.cpp, without a tokenizer, into its folder.

    Args:
        precision: How the matrices are stored, by ggml's name: F32, F16, BF16, Q8_0, Q4_0.
        spelled: Spell tokens as their numbers, without an end of text, for programs that want texts.
    """
    import gguf
    from gguf import quants

    (config, weights), path = read(folder), folder / "model.gguf"
    width = head_width(config)
    rotary = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(str(path), "llama")
    sizes = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "head_count": rotary["attn_q"], "head_count_kv": rotary["attn_k"], "key_length": width, "value_length": width,
        "layer_norm_rms_eps": config["rms_norm_eps"], "rope_dimension_count": width,
        "rope_freq_base": config["rope_parameters"]["rope_theta"], "vocab_size": config["vocab_size"],
    }  # fmt: skip
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_tokenizer_model("rwkv" if spelled else "no_vocab")
    if spelled:
        writer.add_token_list([f" {token}" for token in range(config["vocab_size"])])
    kind = gguf.GGMLQuantizationType[precision]
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {} if config["tie_word_embeddings"] else {"output": "lm_head"}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}" for theirs, ours in _MATRICES.items()}
    for name, source in names.items():
        array = weights[f"{source}.weight"]
        if heads := rotary.get(name.rpartition(".")[2]):
            # transformers rotates the halves of a head against each other, ggml neighbours.
            parts = array.reshape(heads, 2, width // 2, array.shape[1])
            array = parts.swapaxes(1, 2).reshape(array.shape)
        of = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", quants.quantize(np.ascontiguousarray(array), of), raw_dtype=of)
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    return path
