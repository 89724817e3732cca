"""The part of an engine's rounds that is recorded: on which device and of which rules, and the counts of it."""

from collections.abc import Hashable
from dataclasses import dataclass

from transformers import PreTrainedModel

from specdec.interfaces import Verifier
from specdec.placement import is_shared, is_spread, main_device

RECORDING = ("auto", "rounds", "decisions", "off")


def recorded_as(recording: str, model: PreTrainedModel, *, optimize: bool, invariant: bool) -> str:
    """Returns what is recorded on a model's device (see ``Engine``): ``"rounds"``, ``"decisions"`` or ``"off"``.

    Nothing is recorded for a model that is spread over devices or shared by processes: hooks move its weights and its
    tensors, and processes agree on every round before the next one begins.

    Raises:
        ValueError: There is no such way of recording; lists the ways.
    """
    if recording not in RECORDING:
        raise ValueError(f"recording={recording!r}: give one of {', '.join(RECORDING)}")
    device = main_device(model).type
    if recording == "off" or not optimize or is_spread(model) or is_shared(model) or device not in ("cpu", "cuda"):
        return "off"
    return "rounds" if records_rounds(recording, device, invariant=invariant) else "decisions"


def records_rounds(recording: str, device: str, *, invariant: bool) -> bool:
    """Returns whether whole rounds are recorded on a type of device, if anything is.

    The invariant executor finds out the order of the keys on the host, forward by forward.
    """
    return not invariant and (recording == "rounds" or (recording == "auto" and device in ("cpu", "cuda")))


def as_on_gpu(recording: str, device: str) -> bool:
    """Returns whether rounds are padded to few numbers of rows, and begun before the host has read the ones before.

    A CPU gains nothing by either, because it computes the padding and runs the host's code itself: it does so if whole
    rounds are asked for, which shows how they go on a GPU.
    """
    return recording == "rounds" or device != "cpu"


def may_record(verifier: Verifier) -> bool:
    """Returns whether a rule's laws may be replayed without its Python: this project's may, others if they say so."""
    if verifier.recordable is not None:
        return verifier.recordable
    return type(verifier).__module__.partition(".")[0] in ("specdec", "verifiers")


def traits(verifier: Verifier) -> Hashable:
    """Returns what a rule's laws may depend on besides tables: its attributes, which a user may change."""
    return tuple((name, _trait(value)) for name, value in vars(verifier).items())


def _trait(value: object) -> Hashable:
    if isinstance(value, Verifier):
        return id(value), traits(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


@dataclass(frozen=True, kw_only=True)
class RecordingCounts:
    """What was recorded and replayed in an engine so far.

    Attributes:
        rounds: Rounds that were played.
        replayed: Those of them of which every stage that is recorded at all was replayed.
        stages: Stages that were recorded, each for one kind of round.
        replays: Stages that were replayed.
        refused: Why stages could not be recorded, by the stage's name: something failed, and they run as they are.
        by_design: Why rounds or stages are not recorded that nobody would record, with their number.
    """

    rounds: int
    replayed: int
    stages: int
    replays: int
    refused: dict[str, list[str]]
    by_design: dict[str, int]

    @property
    def replayed_share(self) -> float | None:
        """``replayed`` over ``rounds``; None before any was played."""
        return self.replayed / self.rounds if self.rounds else None
