"""An endpoint with the engine of a configuration."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from experiments.config.sections import build
from experiments.session.engines import assemble, settle
from experiments.session.methods import check_components
from specdec.engine.engine import Engine

_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(config: DictConfig) -> None:
    """Serve the configuration's method until a signal.

    Raises:
        ValueError: A setting is wrong, or the address is taken.
        RuntimeError: The engine cannot go on.
    """
    try:
        from experiments.serving.server import Server
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'specdec-research[serve]'") from error
    settle(config)
    methods = {config.method: "drafter"}
    formats = check_components(config, methods, ("target", "verifier", "sampling"))
    target, contenders = assemble(config, methods, formats=formats)
    engine = contenders[-1].engine
    assert isinstance(engine, Engine), "no other engines are assembled"
    if config.template is not None and target.tokenizer is not None:
        try:
            target.tokenizer.chat_template = Path(config.template).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"template={config.template}: {error.strerror}; give the file of a template") from error
    options = {name: config[name] for name in ("host", "port", "queue", "drain", "max_body", "prefix")}
    server = Server(engine, build(config, "sampling"), name=config.name or target.name, **options)
    if config.host not in _LOCAL:
        print(f"everybody who reaches {config.host} can use this server: it asks for no key", file=sys.stderr)
    what = f"{target.name} with {config.method}, {engine.max_batch_size} requests together"
    print(f"{what}: {server.url}/v1 (Ctrl-C stops it)", flush=True)
    server.run()
