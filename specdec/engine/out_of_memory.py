"""What running requests are told when memory runs out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from specdec.memory import NoRoomError, ran_out, shortage
from specdec.slot_memory import SlotMemory
from specdec.target.runner import ModelRunner


def explained(error: BaseException, device: torch.device, *, settings: Mapping[str, int], max_nodes: int) -> str | None:
    """Returns how much memory was missing and which of an engine's settings to lower; None for any other error."""
    if not ran_out(error):
        return None
    sizes = [f"{name}={value}" for name, value in settings.items()]
    if max_nodes:
        sizes.append(f"the draft tree's {max_nodes} nodes")
    return f"{shortage(error, device)}; lower {', '.join(sizes)}"


@contextmanager
def beside_cache_of(runner: ModelRunner) -> Iterator[None]:
    """If a drafter's cache does not fit during the ``with`` block, say what would fit together with the target's."""
    try:
        yield
    except ValueError as error:
        refused = error if isinstance(error, NoRoomError) else error.__cause__
        if not isinstance(refused, NoRoomError):
            raise
        cache = runner.cache
        own = SlotMemory(per_position=runner.bytes_per_token, drafted=cache.positions - cache.max_length)
        raise refused.beside(own, runner.device) from error
