"""Answers requests in the environment of another engine: ``python answer.py MODULE``, the module standing beside this.

Standard input and output are one pipe, by which requests and answers come as messages in JSON; whatever libraries print
goes to standard error. The first request is what ``MODULE.load`` takes. It returns the facts that are answered, and the
function that makes the answers to all further ones. An empty request is answered with the ``cores`` that threads of
this process may use, every different list once. An exception is the answer ``{"error": …}``. At the end its own
``folder`` is removed, since whoever asked may have been killed.
"""

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Answer until nobody asks any more."""
    decode: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    folder = None
    with Connection(os.dup(1)) as pipe, suppress(EOFError, OSError):
        os.dup2(2, 1)
        while True:
            asked = json.loads(pipe.recv_bytes())
            try:
                if decode is None:
                    folder = asked.get("folder")
                    answer, decode = importlib.import_module(sys.argv[1]).load(asked)
                else:
                    answer = decode(asked) if asked else {"cores": cores()}
            except Exception as error:  # whoever asks says it
                answer = {"error": f"{type(error).__name__}: {error}"}
            pipe.send_bytes(json.dumps(answer).encode())
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def cores() -> list[list[int]]:
    """Return the cores that threads of this process may use, every different list once."""
    found: set[tuple[int, ...]] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            found.add(tuple(sorted(os.sched_getaffinity(int(thread)))))
    return sorted(map(list, found))


if __name__ == "__main__":
    main()
