"""What running requests are told when memory runs out."""

from typing import TYPE_CHECKING

from specdec.memory import ran_out, shortage

if TYPE_CHECKING:
    from specdec.engine.engine import Engine


def explained(error: BaseException, engine: "Engine") -> str | None:
    """Returns how much memory was missing and which of an engine's settings to lower; None for any other error."""
    if not ran_out(error):
        return None
    sizes = [f"{name}={getattr(engine, name)}" for name in ("max_batch_size", "prefill_chunk", "max_length")]
    if engine.drafter is not None and engine.drafter.max_nodes:
        sizes.append(f"the draft tree's {engine.drafter.max_nodes} nodes")
    return f"{shortage(error, engine.target.device)}; lower {', '.join(sizes)}"
