"""An endpoint for standard clients: ``python -m experiments.serve drafter=model engine.max_batch_size=8 port=8000``."""

from dataclasses import dataclass
from typing import Annotated, Literal

from experiments.config.kinds import Count, EngineSettings, Natural, Seconds, Section, Settings, Text, Wanted
from experiments.config.launch import Command


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Settings):
    """What ``conf/serve.yaml`` holds."""

    seed: Natural
    target: Section
    drafter: Section
    policy: Section
    verifier: Section
    sampling: Section
    engine: EngineSettings
    host: Text
    port: Annotated[int, Wanted("a port from 0 (any that is free) to 65535", lambda value: 0 <= value < 65536)]
    name: Text | None
    template: Text | None
    queue: Natural
    drain: Seconds
    max_body: Count
    prefix: Literal["specdec", "vllm"]
    method: Text


serve = Command("serve", ServeSettings)
main = serve.main

if __name__ == "__main__":
    main()
