"""How fast is the engine, and is it faster than before? ``python -m experiments.bench parts=[steps] against=COMMIT``.

Use an otherwise idle machine.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from experiments.commands.settings import Settings
from experiments.config.kinds import AtLeastZero, Count, Several, Temperatures, Text, Two, Wanted
from experiments.config.launch import Command


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """What ``conf/bench.yaml`` holds."""

    parts: Several[Literal["steps", "rounds", "gpu"]] | None
    against: Text | None
    repeats: Count
    processes: Two
    device: Text | None
    dtypes: Several[Literal["auto", "float32", "bfloat16", "float16"]]
    quantizations: Annotated[list[Text | None], Wanted("a list of schemes, null for none", bool)]
    inflate: Any
    nodes: Several[Count]
    drafts: Several[Text]
    temperatures: Temperatures
    batch: Several[Count]
    context: Two
    rounds: Two
    shape: Literal["tiny", "llama-8b", "llama-70b"]
    seconds: AtLeastZero


bench = Command("bench", BenchSettings)

if __name__ == "__main__":
    bench.main()
