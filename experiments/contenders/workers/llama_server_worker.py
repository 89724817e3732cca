"""llama.cpp's server, started beside its Python, and asked over HTTP: plainly, with n-grams or with a small model."""

import atexit
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from llamas import converted


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load models as ``given`` says; return versions and threads, and what decodes a batch of one prompt."""
    server, address = serving(given)
    while True:
        with suppress(OSError), urlopen(f"{address}/health"):
            break
        if server.poll() is not None:
            raise ValueError(f"llama-server has ended with exit code {server.returncode}")
        time.sleep(0.2)

    def decode(asked: dict[str, Any]) -> dict[str, Any]:
        (prompt,), (seed,) = asked["prompts"], asked["seeds"]
        body = {
            "top_k": 0, "top_p": 1.0, "min_p": 0.0, **asked["sampling"], "prompt": prompt, "seed": seed,
            "n_predict": asked["max_new_tokens"], "return_tokens": True, "cache_prompt": False,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],  # filters behind the temperature, as elsewhere
            "stream": True, "timings_per_token": True,
        }  # fmt: skip
        tokens, rounds, moments, accepted, ended = [], [], [], 0, False
        with urlopen(Request(f"{address}/completion", json.dumps(body).encode())) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                part, now = json.loads(line.removeprefix(b"data: ")), time.perf_counter()
                for token in part["tokens"]:
                    kept = part["timings"].get("draft_n_accepted", 0)  # counted before the round's tokens are sent
                    if len(tokens) == sum(rounds):
                        rounds.append(kept - accepted + 1)
                        moments.append(now)
                        accepted = kept
                    tokens.append(token)
                ended = part.get("stop_type") == "eos"  # its model's own ends may be more than those that are asked for
                if tokens[-1:] and tokens[-1] in asked["ends"]:
                    break  # it stops when nobody reads
        return {"rows": [{"token_ids": tokens, "rounds": rounds, "moments": moments, "ended": ended}]}

    told = subprocess.run([server.args[0], "--version"], capture_output=True, text=True)
    number = re.search(r"version: (\S+)", told.stdout + told.stderr)
    return {"versions": {"llama.cpp": number[1] if number else "unknown"}, "threads": given["threads"]}, decode


def serving(given: dict[str, Any]) -> tuple[Any, str]:
    """Start the server, which ends with this process, and return it and its address."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("llama-server", path=places)
    if program is None:
        raise ValueError(f"there is no llama-server beside {sys.executable} or on the PATH: build llama.cpp's")
    port, exact = given.get("port"), given["precision"] == "F32"
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    options = {
        "--model": stored(given, "model"), "--port": port, "--threads": given["threads"], "--no-ui": "",
        "--threads-batch": given["threads"], "--parallel": given["max_batch_size"], "--no-warmup": "",
        "--ctx-size": given["max_length"] * given["max_batch_size"], "--cache-ram": 0,
    }  # fmt: skip
    if exact:  # flash attention casts keys and values to half precision
        options |= {"--cache-type-k": "f32", "--cache-type-v": "f32", "--flash-attn": "off"}
    if "draft" in given:
        options |= {
            "--spec-type": "draft-simple", "--spec-draft-model": stored(given, "draft"), "--spec-draft-p-min": 0,
            "--spec-draft-n-max": given["num_tokens"], "--spec-draft-threads": given["threads"],
        }  # fmt: skip
        options |= {"--spec-draft-sampling": "probabilistic"} if given["probabilistic"] else {}  # which not all have
        options |= {"--spec-draft-type-k": "f32", "--spec-draft-type-v": "f32"} if exact else {}
    elif given["num_tokens"] and given.get("ngram"):
        options |= {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": given["ngram"]}
        options |= {"--spec-ngram-simple-size-m": given["num_tokens"]}
    words = [str(word) for pair in options.items() for word in pair if word != ""]
    process = subprocess.Popen([program, *words])
    atexit.register(process.kill)
    return process, f"http://127.0.0.1:{port}"


def stored(given: dict[str, Any], role: str) -> Path:
    """The GGUF file of a model: itself, or what its folder in transformers' layout is converted to."""
    path = Path(given[role])
    return path if path.suffix == ".gguf" else converted(path, given["precision"], Path(given[f"{role}_kept"]))
