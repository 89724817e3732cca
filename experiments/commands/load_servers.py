"""Servers in a study of load: beside our engine (``contenders``), or instead of it (``engine=openai``)."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.config import job
from experiments.config.sections import build, plain
from experiments.contenders.openai import OpenAIServer
from experiments.load.client import Client
from experiments.load.clock import REAL
from experiments.measuring.measure import Contender
from specdec.engine.engine import Engine
from specdec.target.loading import load_tokenizer

_ANY = 1 << 30
"""Tokens per request where the server does not say how many it takes."""


def is_server(config: DictConfig) -> bool:
    """Whether ``engine`` is a server and not the settings of our engine."""
    return config.engine.get("_target_") is not None


def check_servers(config: DictConfig) -> None:
    """Refuse what servers cannot do."""
    if not is_server(config) and not config.contenders:
        return
    servers = "engine=openai" if is_server(config) else f"contenders={[str(name) for name in config.contenders]}"
    if (mode := build(config, "clock").mode) != REAL:
        raise ValueError(f"{servers} with clock={mode}: a server's time is real, give clock=real")
    if config.replicas > 1:
        raise ValueError(f"{servers} with replicas={config.replicas}: a server has its own, give replicas=1")
    for name in ("methods", "policies", "rules", "setups", "contenders") if is_server(config) else ():
        if config.get(name):
            raise ValueError(
                f"{name}={plain(config, name)} with a server as the engine, which has its own: leave it out, or put "
                f"the server beside our engine with +contender=openai"
            )


def server_alone(config: DictConfig) -> Contender:
    """Return the method of ``engine=openai``. Of the target, only the tokenizer is loaded."""
    options = dict(plain(config, "engine"))
    options.pop("max_batch_size", None)  # is our engine's: how many a server decodes together is its own setting
    server: Any = build(OmegaConf.create({"engine": options}), "engine")
    target: Any = SimpleNamespace(
        name=str(config.target.name),
        device=f"the server at {server.address}",
        dtype="its own",
        tokenizer=load_tokenizer(str(config.target.get("tokenizer") or config.target.name)),
        eos_token_ids=frozenset(),
    )
    server.bind(target, max_batch_size=1, max_length=_ANY)
    own = str(config.method) != job.choice("drafter")
    return Contender(str(config.method) if own else job.choice("engine") or "server", server)


def clients_of(contenders: Sequence[Contender]) -> dict[str, Client]:
    """Return the clients of all contenders that are servers, by method."""
    found = {}
    for each in contenders:
        if isinstance(each.engine, OpenAIServer):
            found[each.method] = Client(each.engine)
        elif not isinstance(each.engine, Engine):
            raise ValueError(
                f"contenders.{each.method} answers only when all prompts of a call are done, so it cannot be put under "
                f"load: start it as a server, and give +contender=openai"
            )
    return found
