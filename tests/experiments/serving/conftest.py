"""A tiny engine behind the endpoint, on a free port, in this process; and the same engine without it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from drafters.model import ModelDrafter
from experiments.serving.server import Server
from specdec import Engine, Paging, SamplingParams, Target
from tests.components import perturbed
from tests.experiments.conftest import VOCAB_SIZE, byte_tokenizer
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEFAULTS = SamplingParams(temperature=1.0, max_new_tokens=8)


def tokenizer() -> Any:
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    return made


def engine(**options: Any) -> Engine:
    """The same weights whenever it is called."""
    model = tiny_model(vocab_size=VOCAB_SIZE)
    drafter = ModelDrafter(perturbed(model, 0.1), 3)
    options = {"max_batch_size": 4, "max_length": 128, "cache": Paging(page_size=16, shared=True)} | options
    return Engine(Target(model, tokenizer()), drafter, RejectionVerifier(), **options)


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Server]:
    """A server in a thread of its own; it has to end by itself, and with nothing left in the engine."""
    server = Server(engine, DEFAULTS, name="tiny", port=0, **options)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: answers(server.url))
        yield server
    finally:
        if not failures:
            server.stop()
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert [str(error) for error in failures] == ([server.failure] if server.failure else [])


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    done = threading.Event()
    for _ in range(int(seconds * 200)):
        if condition():
            return
        done.wait(0.005)
    pytest.fail("that never happened")


def metric(server: Server, name: str) -> float:
    """A figure of ``/metrics``, added up over its labels."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"specdec:{name}{{"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(engine(), max_body=100_000) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Engine:
    return engine()
