"""An engine under load: ``python -m experiments.load workload=chat arrival=poisson rates=[1,2,4] sla.ttft=0.5``.

Plain decoding and a method are given the same requests at the same moments, one after the other. The tables and
pictures say who waited, for how long, and how many requests kept the limits.
"""

from dataclasses import dataclass
from typing import Annotated

from experiments.commands.settings import MeasuredSettings
from experiments.config.kinds import Count, Positive, Wanted
from experiments.config.launch import Command


@dataclass(frozen=True, kw_only=True)
class LengthsSettings:
    """The section ``lengths``: how planned lengths become the model's."""

    scale: Positive


@dataclass(frozen=True, kw_only=True)
class LoadSettings(MeasuredSettings):
    """What ``conf/load.yaml`` holds."""

    requests: Count | None
    rates: Annotated[list[Positive], Wanted("a list of rates, each above 0, as 'rates=[1,2,4]'", bool)] | None
    lengths: LengthsSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.methods and not self.drafts and (self.policies or self.policy.get("_target_") is not None):
            raise ValueError(
                "a policy is given, and plain decoding alone drafts nothing: give a drafter or policy=none"
            )


load = Command("load", LoadSettings)

if __name__ == "__main__":
    load.main()
