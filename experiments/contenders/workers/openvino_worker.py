"""OpenVINO GenAI in its own environment, decoding step by step, and a Llama or Qwen2 as the graph that it reads."""

import shutil
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from llamas import Weights, read

_BLOCK = 32
"""Tokens in a block of its cache on CPUs."""


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load models as ``given`` says; return versions and threads, and what decodes a batch of prompts."""
    import openvino  # pyright: ignore[reportMissingImports]
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]

    core = openvino.Core()
    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    computed = given["precision"] if given["precision"] in able else "FP32"  # as ours, where 16 bits are stored alone
    precision, exact = (
        getattr(openvino.Type, name.replace("P", "").lower()) for name in (given["precision"], computed)
    )
    used = {"INFERENCE_NUM_THREADS": given["threads"], "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
    # Left alone it computes float32 models in bfloat16 where the CPU can, and keeps keys and values in 8 bits.
    properties = used | {
        "INFERENCE_PRECISION_HINT": exact,
        "KV_CACHE_PRECISION": exact,
        "sampler_num_threads": 1,
    }
    rows, tokens = given["max_batch_size"], given["max_length"] + given["num_tokens"]
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = rows, rows * tokens
    scheduler.num_kv_blocks = rows * (tokens // _BLOCK + 2)  # else it allocates while it decodes
    folder, drafting = write(Path(given["model"]), precision, given["weights"], Path(given["model_kept"])), {}
    if "draft" in given:
        draft = write(Path(given["draft"]), precision, given["weights"], Path(given["draft_kept"]))
        drafting = {"draft_model": genai.draft_model(str(draft), "CPU", **properties)}
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
            row: dict[str, Any] = {"token_ids": [], "rounds": [], "moments": []}
            found.append((pipeline.add_request(next(numbers), ids, config), row))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle, row in found:
                while handle.can_read():
                    (made,) = handle.read().values()
                    row["token_ids"] += made.generated_ids
                    row["rounds"].append(len(made.generated_ids))
                    row["moments"].append(time.perf_counter())
        return {"rows": [row for _, row in found]}

    versions = {"OpenVINO GenAI": version("openvino-genai"), "OpenVINO": version("openvino")}
    versions |= {} if computed == given["precision"] else {"computing in": computed}
    threads = core.compile_model(nothing("f32"), "CPU", used).get_property("INFERENCE_NUM_THREADS")
    return {"versions": versions, "threads": threads}, decode


def write(folder: Path, precision: Any, weights: str | None, into: Path) -> Path:
    """Write a model in transformers' layout as OpenVINO reads it, and an idle tokenizer, unless they are there.

    Args:
        precision: How the matrices are stored.
        weights: In fewer bits instead, by NNCF without data: int4 (groups of 128) or int8; None: not.
        into: The folder that takes both. The model is written last, and named when it is whole.
    """
    import openvino  # pyright: ignore[reportMissingImports]

    if (into / "openvino_model.xml").exists():
        return into
    into.mkdir(parents=True, exist_ok=True)
    kept: list[np.ndarray] = []
    model = llama(*read(folder), precision, kept)
    if weights is not None:
        import nncf  # pyright: ignore[reportMissingImports]

        mode, grouped = nncf.CompressWeightsMode[f"{weights.upper()}_SYM"], {"group_size": 128, "all_layers": True}
        # The product of places and rotations has one channel: it stays as it is.
        others = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.IGNORE)
        grouped["advanced_parameters"] = others
        model = nncf.compress_weights(model, mode=mode, **(grouped if weights == "int4" else {}))
    shutil.copy(folder / "config.json", into)
    openvino.save_model(nothing("string"), into / "openvino_tokenizer.xml")
    openvino.save_model(model, into / "part.xml", compress_to_fp16=False)
    (into / "part.bin").rename(into / "openvino_model.bin")
    (into / "part.xml").rename(into / "openvino_model.xml")
    return into


def nothing(kind: str) -> Any:
    """A model that returns a constant. As a tokenizer it lets a draft model's be compared with the target's."""
    import openvino  # pyright: ignore[reportMissingImports]
    from openvino import opset15 as op  # pyright: ignore[reportMissingImports]

    outputs = [op.result(op.constant(np.zeros((1, 1), np.int64))) for _ in range(2)]
    for output, name in zip(outputs, ("input_ids", "attention_mask"), strict=True):
        output.output(0).set_names({name})
    return openvino.Model(outputs, [op.parameter([-1], getattr(openvino.Type, kind))], "nothing")


def llama(config: Mapping[str, Any], weights: Weights, precision: Any, kept: list[np.ndarray]) -> Any:
    """A Llama or Qwen2 with its cache as a state, in the operations that OpenVINO fuses: norms, rotations, attention.

    Args:
        config: The model's configuration, as ``llamas.read`` gives it.
        precision: How the matrices are stored.
        kept: Takes the arrays whose memory the model shares.
    """
    import openvino  # pyright: ignore[reportMissingImports]
    from openvino import opset15 as op  # pyright: ignore[reportMissingImports]

    width, heads, shared = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    sinks: list[Any] = []

    def integers(*numbers: int) -> Any:
        return op.constant(np.array(numbers, np.int64))

    def number(value: float) -> Any:
        return op.constant(np.float32(value))

    def weight(name: str) -> Any:
        array = weights(f"{name}.weight")
        assert array is not None, "every layer has its matrices"
        if array.ndim == 1 or precision == openvino.Type.f32:
            return op.constant(array)
        bits = array.view(np.uint32)  # rounded here: OpenVINO takes a minute per model
        half = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        shape, stored = openvino.Shape(array.shape), half if precision == openvino.Type.bf16 else array.astype("<f2")
        kept.append(stored)  # the constant shares its memory
        return op.convert(op.constant(openvino.Tensor(stored, shape, precision)), "f32")

    def linear(x: Any, name: str) -> Any:
        product, bias = op.matmul(x, weight(name), False, True), weights(f"{name}.bias")
        return product if bias is None else op.add(product, op.constant(bias))

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

    def cached(x: Any, name: str) -> Any:
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
    turns = config["rope_theta"] ** (-np.arange(0, width, 2, dtype=np.float32) / width)
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
        key = cached(rotated(split(linear(y, f"{at}.self_attn.k_proj"), shared)), f"{at}.key")
        value = cached(split(linear(y, f"{at}.self_attn.v_proj"), shared), f"{at}.value")
        y = op.transpose(op.scaled_dot_product_attention(query, key, value, hidden), integers(0, 2, 1, 3))
        x = op.add(x, linear(op.reshape(y, integers(0, 0, heads * width), True), f"{at}.self_attn.o_proj"))
        y = norm(x, f"{at}.post_attention_layernorm")
        y = op.multiply(op.swish(linear(y, f"{at}.mlp.gate_proj")), linear(y, f"{at}.mlp.up_proj"))
        x = op.add(x, linear(y, f"{at}.mlp.down_proj"))
    output = table if config.get("tie_word_embeddings") else weight("lm_head")
    logits = op.result(op.matmul(norm(x, "model.norm"), output, False, True))
    logits.output(0).set_names({"logits"})
    return openvino.Model([logits], sinks, inputs, "llama")
