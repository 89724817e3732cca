"""A request's time on a device, and what shortens it: prefill, drafting, and the target's steps."""

from dataclasses import dataclass, replace

from experiments.bench.chapter.given import GIVEN, LONGEST
from experiments.bench.chapter.models import A100, HALF, LLAMA_8B
from specdec.physics import heads
from specdec.physics.bounds import Roof
from specdec.physics.precision import Precision
from specdec.physics.rounds import DraftModel, RoofRounds
from specdec.physics.speculation import best_length, chain_tokens
from specdec.physics.work import prefill_work


@dataclass(frozen=True)
class RequestTime:
    """The least time of a request that is served alone.

    Attributes:
        name: What was changed.
        prefill: Seconds of its prompt.
        draft: Seconds of all drafting.
        target: Seconds of all steps of the target.
    """

    name: str
    prefill: float
    draft: float
    target: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.prefill + self.draft + self.target


def requests() -> list[RequestTime]:
    """Returns the short request of Llama-3.1-8B on an A100, with one thing changed at a time, and with two."""
    roof = A100.roof("float16")
    int4 = Precision.of("float16", weights="int4", group=64, output="float16")
    faster, wider = replace(roof, flops=2 * roof.flops), replace(roof, bandwidth=2 * roof.bandwidth)
    return [
        _request("as it is", roof, HALF),
        _request("twice the FLOP/s", faster, HALF),
        _request("twice the bandwidth", wider, HALF),
        _request("weights in int4", roof, int4),
        _request("speculation", roof, HALF, drafting=True),
        _request("int4 and speculation", roof, int4, drafting=True),
    ]


def _request(name: str, roof: Roof, precision: Precision, *, drafting: bool = False) -> RequestTime:
    prefill = prefill_work(LLAMA_8B, precision, tokens=GIVEN.prompt).by_parts(roof)
    head = DraftModel(shape=heads.eagle3(LLAMA_8B), precision=HALF)
    cost = RoofRounds(shape=LLAMA_8B, precision=precision, roof=roof, drafter=head)
    context = GIVEN.prompt + GIVEN.output / 2  # what rows have halfway
    if not drafting:
        return RequestTime(name, prefill, 0.0, GIVEN.output * cost.verify(batch=1, drafted=0, context=context))
    drafted = best_length(cost, GIVEN.acceptance, batch=1, context=context, longest=LONGEST).drafted
    rounds = GIVEN.output / chain_tokens(GIVEN.acceptance, drafted)
    draft = cost.draft(batch=1, drafted=drafted, context=context)
    verify = cost.verify(batch=1, drafted=drafted, context=context)
    return RequestTime(f"{name}, {drafted} drafted", prefill, rounds * draft, rounds * verify)
