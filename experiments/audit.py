"""Is a decoder lossless, with stated odds? ``python -m experiments.audit drafter=model verifier=rejection``.

The subject is our engine; another engine (``+contender=hf_assisted``, ``+contender=openai``); or a function of yours
(``function=my_module.generate``, called with prompt ids, sampling and n). The law of its next tokens is computed from
the target itself. Before it starts, the audit says how surely it will see each mistake that engines have shipped; then
it looks at outputs after the prompts where these would show most, and stops when it is sure. A subject that is not
lossless is an error.
"""

from dataclasses import dataclass
from typing import Annotated

from experiments.config.kinds import (
    Count,
    Distance,
    EngineSettings,
    Natural,
    Options,
    Section,
    Settings,
    Share,
    Text,
    Texts,
    number,
)
from experiments.config.launch import Command


@dataclass(frozen=True, kw_only=True)
class AuditSettings(Settings):
    """What ``conf/audit.yaml`` holds."""

    seed: Natural
    target: Section
    drafter: Section
    policy: Section
    verifier: Section
    sampling: Section
    dataset: Section
    engine: EngineSettings
    contenders: Section
    function: Text | None
    reference: Text
    assistant: Text
    mistakes: Texts
    context: Count
    horizon: Count | None
    drafted: Count
    undrafted: Natural
    level: Share
    tolerance: Distance
    wanted: Share
    least: Distance
    prompts: Count
    shift: Annotated[float, number("a probability of at most 0.2", lambda value: 0 < value <= 0.2)]
    block: Count
    max_samples: Count
    chat_template: Options
    resume: bool


audit = Command("audit", AuditSettings)
main = audit.main

if __name__ == "__main__":
    main()
