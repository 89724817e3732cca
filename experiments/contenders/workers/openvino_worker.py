"""OpenVINO GenAI in its own environment, decoding step by step, and a Llama as the graph that it reads."""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp_worker import head_width, read

_BLOCK = 32
"""Tokens in a block of its cache on CPUs."""
Decode = Callable[[dict[str, Any]], dict[str, Any]]


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Decode]:
    """Load models as ``given`` says; return versions and threads, and what decodes a batch of prompts."""
    import openvino  # pyright: ignore[reportMissingImports]
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]

    core = openvino.Core()
    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if given["precision"] not in able:
        raise ValueError(f"OpenVINO computes in {', '.join(able)} on this CPU, and not in {given['precision']}")
    precision = getattr(openvino.Type, given["precision"].replace("P", "").lower())
    used = {"INFERENCE_NUM_THREADS": given["threads"], "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
    # Left alone it computes float32 models in bfloat16 where the CPU can, and keeps keys and values in 8 bits.
    properties = used | {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "sampler_num_threads": 1,
    }
    rows, tokens = given["max_batch_size"], given["max_length"] + given["num_tokens"]
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = rows, rows * tokens
    scheduler.num_kv_blocks = rows * (tokens // _BLOCK + 2)  # else it allocates while it decodes
    folder, drafting = Path(given["model"]), {}
    write(folder, precision)
    if given["draft"] is not None:
        write(Path(given["draft"]), precision)
        drafting = {"draft_model": genai.draft_model(given["draft"], "CPU", **properties)}
    elif given["ngram"]:
        drafting = {"prompt_lookup": True}
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties | drafting)
    numbers = count()

    def decode(asked: dict[str, Any]) -> dict[str, Any]:
        config, sampling = genai.GenerationConfig(), asked["sampling"]
        config.do_sample = sampling["temperature"] > 0
        for name, value in sampling.items():
            if value or name != "top_k":
                setattr(config, name, value)
        ends = asked["ends"] or [0]
        config.set_eos_token_id(ends[0])  # else the model's own ends outputs, too
        config.stop_token_ids, config.ignore_eos = set(ends), not asked["ends"]
        config.max_new_tokens = asked["max_new_tokens"]
        config.num_assistant_tokens, config.max_ngram_size = given["num_tokens"], given["ngram"]
        found = []
        for prompt, config.rng_seed in zip(asked["prompts"], asked["seeds"], strict=True):
            ids = openvino.Tensor(np.array([prompt], np.int64))
            found.append((pipeline.add_request(next(numbers), ids, config), {"token_ids": [], "rounds": []}))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle, row in found:
                while handle.can_read():
                    (made,) = handle.read().values()
                    row["token_ids"] += made.generated_ids
                    row["rounds"].append(len(made.generated_ids))
        return {"rows": [row for _, row in found]}

    versions = {"OpenVINO GenAI": version("openvino-genai"), "OpenVINO": version("openvino")}
    threads = core.compile_model(nothing("f32"), "CPU", used).get_property("INFERENCE_NUM_THREADS")
    wrong = "" if given["draft"] is None else wrong_draws(decode, versions["OpenVINO GenAI"])
    return {"versions": versions, "threads": threads, "wrong_draws": wrong}, decode


def wrong_draws(decode: Decode, number: str) -> str:
    """Return what is wrong with draws behind a draft model, in words; empty if nothing is.

    Close to temperature 0, draws from a target's law are its likeliest tokens. 2026.4 keeps every draft instead.
    """
    near = {"temperature": 1e-4, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    for token in range(8):
        asked = {"prompts": [[token] * 4], "seeds": [0], "max_new_tokens": 8, "ends": []}
        drawn, greedy = (decode(asked | {"sampling": each}) for each in (near, near | {"temperature": 0.0}))
        if drawn["rows"][0]["token_ids"] != greedy["rows"][0]["token_ids"]:
            return f"OpenVINO GenAI {number} keeps drafted tokens by another rule than speculative sampling's"
    return ""


def write(folder: Path, precision: Any) -> None:
    """Write a model in transformers' layout as OpenVINO reads it, and an idle tokenizer, into its folder."""
    import openvino  # pyright: ignore[reportMissingImports]

    for name, model in (("model", llama(*read(folder), precision)), ("tokenizer", nothing("string"))):
        openvino.save_model(model, folder / f"openvino_{name}.xml", compress_to_fp16=False)


def nothing(kind: str) -> Any:
    """A model that returns a constant. As a tokenizer it lets a draft model's be compared with the target's."""
    import openvino  # pyright: ignore[reportMissingImports]
    from openvino import opset15 as op  # pyright: ignore[reportMissingImports]

    outputs = [op.result(op.constant(np.zeros((1, 1), np.int64))) for _ in range(2)]
    for output, name in zip(outputs, ("input_ids", "attention_mask"), strict=True):
        output.output(0).set_names({name})
    return openvino.Model(outputs, [op.parameter([-1], getattr(openvino.Type, kind))], "nothing")


def llama(config: Mapping[str, Any], weights: Mapping[str, np.ndarray], precision: Any) -> Any:
    """A Llama with its cache as a state, in the operations that OpenVINO fuses: its norms, rotations and attention.

    Args:
        config: The model's ``config.json``.
        weights: Weights by name, in float32.
        precision: How the matrices are stored.

    Raises:
        ValueError: As ``head_width`` says.
    """
    import openvino  # pyright: ignore[reportMissingImports]
    from openvino import opset15 as op  # pyright: ignore[reportMissingImports]

    width, heads, shared = head_width(config), config["num_attention_heads"], config["num_key_value_heads"]
    sinks: list[Any] = []

    def integers(*numbers: int) -> Any:
        return op.constant(np.array(numbers, np.int64))

    def number(value: float) -> Any:
        return op.constant(np.float32(value))

    def weight(name: str) -> Any:
        array = weights[f"{name}.weight"]
        return op.constant(array) if array.ndim == 1 else op.convert(op.constant(array, dtype=precision), "f32")

    def linear(x: Any, name: str) -> Any:
        return op.matmul(x, weight(name), False, True)

    def norm(x: Any, name: str) -> Any:
        mean = op.reduce_mean(op.power(x, number(2)), integers(-1), True)
        root = op.sqrt(op.add(mean, number(config["rms_norm_eps"])))
        return op.multiply(weight(name), op.multiply(x, op.divide(number(1), root)))

    def split(x: Any, several: int) -> Any:
        return op.transpose(op.reshape(x, integers(0, 0, several, width), True), integers(0, 2, 1, 3))

    def rotated(x: Any) -> Any:
        lower, upper = (
            op.slice(x, integers(start), integers(end), integers(1), integers(3))
            for start, end in ((0, width // 2), (width // 2, width))
        )
        return op.add(op.multiply(x, cos), op.multiply(op.concat([op.multiply(upper, number(-1)), lower], -1), sin))

    def kept(x: Any, name: str) -> Any:
        """The state of this name with x behind it, once per head of the queries."""
        info = openvino.op.util.VariableInfo()
        info.data_shape, info.data_type = openvino.PartialShape([-1, shared, -1, width]), openvino.Type.f32
        info.variable_id = name
        variable = openvino.op.util.Variable(info)
        empty = op.broadcast(number(0), op.concat([batch, integers(shared, 0, width)], 0))
        x = op.concat([op.gather(op.read_value(empty, variable), rows, integers(0)), x], 2)
        sinks.append(op.assign(x, variable))
        if heads == shared:
            return x
        shape = op.concat([batch, integers(shared, heads // shared, 1, 1)], 0)
        several = op.broadcast(op.unsqueeze(x, integers(2)), shape, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(several, integers(0, heads, -1, width), True)

    kinds = {"input_ids": np.int64, "attention_mask": np.int64, "position_ids": np.int64, "beam_idx": np.int32}
    inputs = [op.parameter([-1] * (1 + (kind is np.int64)), kind, name=name) for name, kind in kinds.items()]
    for each, name in zip(inputs, kinds, strict=True):
        each.output(0).set_names({name})
    ids, mask, places, rows = inputs
    batch = op.gather(op.shape_of(ids), integers(0), integers(0))
    turns = config["rope_parameters"]["rope_theta"] ** (-np.arange(0, width, 2, dtype=np.float32) / width)
    angles = op.matmul(
        op.constant(turns.reshape(1, -1, 1)), op.convert(op.unsqueeze(places, integers(1)), "f32"), False, False
    )
    angles = op.transpose(angles, integers(0, 2, 1))
    angles = op.unsqueeze(op.concat([angles, angles], -1), integers(1))
    cos, sin = op.cos(angles), op.sin(angles)
    length = op.squeeze(op.gather(op.shape_of(mask), integers(1), integers(0)), integers(0))
    keys = op.range(op.constant(np.int64(0)), length, op.constant(np.int64(1)), "i64")
    seen = op.less_equal(op.unsqueeze(keys, integers(0, 1, 2)), op.unsqueeze(places, integers(1, 3)))
    hidden = op.select(seen, number(0), number(-65504))

    table = weight("model.embed_tokens")
    x = op.gather(table, ids, op.constant(np.int64(0)))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        query = rotated(split(linear(y, f"{at}.self_attn.q_proj"), heads))
        key = kept(rotated(split(linear(y, f"{at}.self_attn.k_proj"), shared)), f"{at}.key")
        value = kept(split(linear(y, f"{at}.self_attn.v_proj"), shared), f"{at}.value")
        y = op.transpose(op.scaled_dot_product_attention(query, key, value, hidden), integers(0, 2, 1, 3))
        x = op.add(x, linear(op.reshape(y, integers(0, 0, heads * width), True), f"{at}.self_attn.o_proj"))
        y = norm(x, f"{at}.post_attention_layernorm")
        y = op.multiply(op.swish(linear(y, f"{at}.mlp.gate_proj")), linear(y, f"{at}.mlp.up_proj"))
        x = op.add(x, linear(y, f"{at}.mlp.down_proj"))
    output = table if config["tie_word_embeddings"] else weight("lm_head")
    logits = op.result(op.matmul(norm(x, "model.norm"), output, False, True))
    logits.output(0).set_names({"logits"})
    return openvino.Model([logits], sinks, inputs, "llama")
