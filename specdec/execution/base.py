"""What an executor is: one way of running a model's forward."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from specdec.cache.base import Cache
from specdec.execution.freshness import Change, Freshness
from specdec.execution.recording import UnrecordableError, recording_now
from specdec.forward import ForwardBatch, ForwardOutput

if TYPE_CHECKING:
    from specdec.target.plan import ModelPlan


class Executor(ABC):
    """Runs forwards of one model, and knows when what it keeps for that has gone stale.

    Args:
        model: The model. The caller of ``run`` holds its lock (``model_lock``).

    Attributes:
        captures: Whether forwards of a shape that comes often are captured.
    """

    captures: bool = False

    def __init__(self, model: nn.Module):
        self.freshness = Freshness(model)

    def look(self) -> Change:
        """Returns what has changed about the model since the last call, and drops what was derived from the old one."""
        return self.freshness.look()

    def weights_changed(self) -> None:  # noqa: B027 (many keep nothing)
        """Drop everything that was derived from weights, after a change that ``look`` cannot see."""

    def copies(self) -> dict[int, int]:
        """Returns the bytes of the copies that forwards read in the place of parameters, by the parameter's ``id``.

        A copy may take fewer bytes than the parameter: 16 bits for a float32 weight that needs no more.
        """
        return {}

    def check_recordable(self) -> None:
        """Refuse to take part in a recording with modules or hooks from elsewhere, whose Python would not run again.

        Raises:
            UnrecordableError: A stage is being recorded, and the model has such code.
        """
        if recording_now() and not self.freshness.known:
            raise UnrecordableError("the model has modules or hooks from elsewhere")

    def at_first_sight(self) -> AbstractContextManager[None]:
        """Capture forwards, during the ``with`` block, when their shape comes for the first time."""
        return nullcontext()

    @abstractmethod
    def run(self, plan: "ModelPlan", batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        """Returns what the batch wants, and leaves the keys and values of its nodes in the cache."""
