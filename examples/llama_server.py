"""llama.cpp's server with the bundled pair, to be audited as a server: in float32, on one thread, at port 8080.

    python examples/llama_server.py                  with a small model that drafts its most probable token
    python examples/llama_server.py probabilistic    with one that draws its drafts
    python examples/llama_server.py plain            without drafts
    python -m experiments.audit +contender=openai contenders.openai.base_url=http://127.0.0.1:8080/v1 undrafted=1

It runs in an environment of its own, with xllamacpp and gguf: SPECDEC_LLAMACPP_PYTHON names its Python. Ctrl-C ends it.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from experiments.contenders.peers import LlamaCpp
from specdec import bundled

WORKERS = Path(__file__).parents[1] / "experiments/contenders/workers"
STARTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from llama_server_worker import serving
running, where = serving(json.loads(sys.argv[2]))
print(where, flush=True)
running.wait()
"""
KINDS = {"": ["model", "draft"], "probabilistic": ["model", "draft"], "plain": ["model"]}
ALONE = {"port": 8080, "precision": "F32", "max_length": 512, "max_batch_size": 4, "threads": 1, "num_tokens": 1}


def main(*words: str) -> None:
    """Write the models below ``outputs/llama_server``, and become the server.

    Raises:
        ValueError: There is no such kind of server, or no environment to run it in.
    """
    kind = " ".join(words)
    if kind not in KINDS:
        raise ValueError(f"{kind!r}: give plain, probabilistic or nothing")
    python = os.environ.get(LlamaCpp.VARIABLE)
    if python is None or shutil.which(python) is None:
        raise ValueError(
            f"{LlamaCpp.VARIABLE}={python or ''} is no program: give an environment's Python, with xllamacpp and gguf"
        )
    given: dict[str, object] = {"probabilistic": kind == "probabilistic", **ALONE}
    for role, name in zip(KINDS[kind], ("target", "drafter"), strict=False):
        folder = Path("outputs/llama_server", name)
        model = AutoModelForCausalLM.from_pretrained(bundled.resolve(f"bundled/{name}"), dtype="float32")
        model.save_pretrained(folder)
        given |= {role: str(folder), f"{role}_kept": str(folder)}
    os.execv(python, [python, "-c", STARTS, str(WORKERS), json.dumps(given)])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
