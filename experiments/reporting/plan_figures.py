"""The figures of a plan, as they are written into a file."""

from dataclasses import asdict
from typing import Any

from experiments.planning.answers import Request, Speculation
from experiments.planning.plan import Plan


def figures_of(plan: Plan) -> dict[str, Any]:
    """Returns all figures by name, for ``plan.json``. Bytes, seconds and operations, without prefixes."""
    asked = plan.asked
    grid = plan.map
    return {
        "schema": 1,
        "asked": {
            "target": asked.name,
            "parameters": asked.shape.weights,
            "formats": asked.formats,
            "precision": asdict(asked.precision),
            "device": asked.device.name,
            "source": asked.device.source,
            "measured": asked.measured,
            "bandwidth": asked.roof.bandwidth,
            "flops": asked.roof.flops,
            "batch": list(asked.batches),
            "context": asked.context,
            "prompt": asked.prompt,
            "output": asked.output,
            "drafter": None if asked.drafter is None else asked.drafter.title,
            "acceptance": asked.acceptance,
            "longest": plan.longest,
            "usable": asked.usable,
            "price": asked.price,
            "costs": None if asked.costs is None else asdict(asked.costs.rounds.conditions),
        },
        "memory": [
            {"batch": r.batch, **asdict(r.memory), "total": r.memory.total, "fits": r.fits, "longest": r.longest}
            for r in plan.rooms
        ],
        "most_rows": plan.most_rows,
        "most_paged_rows": plan.most_paged_rows,
        "forwards": [
            {
                "what": phase.what,
                "batch": phase.batch,
                **asdict(phase.work),
                "intensity": phase.work.total.intensity,
                "bound": phase.work.bound(asked.roof),
                "seconds": phase.seconds,
                "predicted_seconds": phase.predicted,
                "tokens": phase.tokens,
            }
            for phase in plan.phases
        ],
        "speculation": [_dict(each) for each in plan.speculations] if asked.drafter is not None else [],
        "requests": {
            "plain": [_dict(each) for each in plan.requests(speculate=False)],
            "speculative": [_dict(each) for each in plan.requests(speculate=True)] if asked.drafter else [],
        },
        "critical_context": {
            "plain": plan.critical_context(0),
            "verify": plan.critical_context(plan.fixed) if asked.drafter is not None else None,
        },
        "map": {
            "batches": list(grid.batches),
            "contexts": list(grid.contexts),
            "drafted": [[each and each.drafted for each in row] for row in grid.best],
            "speedup": [[each and each.speedup for each in row] for row in grid.best],
            "fits": [list(row) for row in grid.fits],
            "break_even_batch": list(grid.break_even),
            "break_even_known": list(grid.known),
        }
        if asked.drafter is not None
        else None,
    }


def _dict(figures: Speculation | Request | None) -> dict[str, Any] | None:
    return None if figures is None else asdict(figures)
