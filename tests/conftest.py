"""What every test shares: no network, few threads, seeds, and the large libraries loaded once."""

import os

# Before transformers, huggingface_hub and matplotlib are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["MPLBACKEND"] = "agg"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tests start subprocesses, and tokenizers warn about a fork
os.environ.setdefault("SPECDEC_NATIVE", "1")  # what other tests leave of the machine decides about nothing

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from tests.shapes import begin_checks

# Examples are the same in every run; times of a busy machine are no failures.
settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")


# Triton's kernels run in its interpreter. It looks for this when it is imported, which transformers does where it is
# installed, and the conftest.py of a folder imports that before anything is configured.
os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Let tests that are for a GPU run Triton's kernels there."""
    wanted = str(config.getoption("markexpr"))
    if "gpu" in wanted and "not gpu" not in wanted:
        del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test whose name has an address: it is another one in every process, and they could not share tests."""
    if nameless := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give these tests ids: {nameless}")


def pytest_collectstart() -> None:
    """Load the large libraries before the first module of the project.

    While jaxtyping imports one of its packages, everything imported on the way looks for byte code in jaxtyping's own
    cache, and is compiled anew where it is not there: several seconds in every process. The process that hands out
    the tests collects none and needs none of them.
    """
    _load_libraries()


@cache
def _load_libraries() -> None:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    import transformers.modeling_utils  # noqa: F401


@pytest.fixture(autouse=True)
def _fresh_start() -> None:
    """Every test begins with the same random state, one thread and its checks, whichever tests ran before it."""
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a program under test may have set what fits the machine
    begin_checks()


@pytest.fixture(scope="module")
def untried() -> Iterator[None]:
    """Runners trust that a model's logits are its own, which ``test_architectures`` tries."""
    import specdec.target.facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specdec.target.facts, "_trial", lambda *args: None)
        yield


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny Llama of two layers, with the module's ``VOCAB`` tokens and the ``SCALE`` of its logits."""
    from tests.models import tiny_model

    return tiny_model(vocab_size=request.module.VOCAB, scale=getattr(request.module, "SCALE", 1.0), layers=2)


@pytest.fixture(scope="module")
def target(model: Any) -> Any:
    from specdec import Target

    return Target(model)
