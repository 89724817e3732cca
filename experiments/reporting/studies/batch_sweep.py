"""The same prompts at several batch sizes: latency against throughput, its knee, and where speculation stops paying."""

from collections.abc import Mapping

import numpy as np

from experiments.reporting.columns import ALL_USERS, CLOSED, IN_FLIGHT, SPEEDUP, TPOT, TTFT, USER, T
from experiments.reporting.study import SERIES, Panel, Study
from experiments.reporting.table import Col, words
from experiments.results.comparison import dataset_name
from experiments.results.frame import Frame
from experiments.results.runs import Run

BATCH = "config.engine.max_batch_size"
KNEE = "knee: largest throughput for its latency"


def with_knees(frame: Frame, _: Mapping[str, Run]) -> Frame:
    """Mark each series' largest ratio of throughput to latency (Kleinrock 1979), unless it is at the largest batch.

    The curve may still rise there. Of equal ratios the smallest batch has the knee.
    """
    frame = frame[frame["tpot.p50"] > 0].reset_index(drop=True)
    power = frame.output_tokens_per_second / frame["tpot.p50"]
    top = frame.index == power.groupby([frame[name] for name in SERIES]).transform("idxmax")
    last = frame[BATCH] == frame.groupby(SERIES)[BATCH].transform("max")
    return frame.assign(knee=np.where(top & ~last, KNEE, ""))


def crossings(own: Frame) -> list[tuple[float, str]]:
    """Return where a series' speedup passes 1, on a straight line over the logarithm of the batch, and how in words."""
    known = own[own.speedup.notna()]
    gain, batch = known.speedup.to_numpy() - 1, known[BATCH].to_numpy(dtype=float)
    certain = ((known.speedup_low > 1) | (known.speedup_high < 1)).to_numpy()
    found = []
    for left in np.flatnonzero((gain[:-1] > 0) != (gain[1:] > 0)):
        share = gain[left] / (gain[left] - gain[left + 1])
        at = float(np.exp(np.interp(share, [0, 1], np.log(batch[left : left + 2]))))
        verb = "stops to be faster" if gain[left] > 0 else "begins to be faster"
        doubt = "" if certain[left : left + 2].all() else ", as far as the intervals tell: one of them holds 1"
        place = f"between batch {batch[left]:.0f} and {batch[left + 1]:.0f}, at about {at:.1f}"
        found.append((at, f"{verb} than plain decoding {place}{doubt}"))
    return found


def sentences(frame: Frame) -> list[str]:
    """Where each curve has its knee, and where speculation stops paying."""
    said = []
    for (temperature, name), own in frame.groupby(SERIES, sort=False):
        knee, known = own[own.knee != ""][BATCH], own[own.speedup.notna()]
        words = [f"knee at batch {knee.iloc[0]}" if len(knee) else "no knee up to the largest batch"]
        words += [sentence for _, sentence in crossings(own)]
        if len(words) == 1 and len(known):
            side, batches = "faster" if known.speedup.iloc[0] > 1 else "slower", known[BATCH]
            words.append(f"{side} than plain decoding at every batch size, {batches.iloc[0]} to {batches.iloc[-1]}")
        said.append(f"{name}, T={temperature:g}: {'; '.join(words)}")
    return said


report = Study(
    name="batch_sweep",
    title="Latency and throughput by batch size, and where speculation pays",
    x=BATCH,
    give="engine.max_batch_size=1,2,4",
    columns=[
        *(T, words("method", "name"), Col("batch", BATCH, "d"), IN_FLIGHT, TTFT, TPOT),
        *(USER, ALL_USERS, SPEEDUP, words("", "knee")),
    ],
    panels=[
        Panel(
            x="tpot.p50",
            y="output_tokens_per_second",
            labels=("time per further token of one user (ms, median)", "output tokens/s of all users"),
            scale=(1e3, 1.0),
            beside=BATCH,
            ring="knee",
        ),
        Panel(x=BATCH, y="speedup", labels=("batch size", "tokens/s over plain decoding's"), at=1.0, log=True),
    ],
    derive=with_knees,
    sentences=sentences,
    notes=[CLOSED],
    facts=[dataset_name],
)
