"""Measure this machine for the chapter's roofline, and write the row that the chapter reads."""

import datetime
import os
import platform
from pathlib import Path

HEADER = "# Made by `python -m experiments.bench chapter measure=true`: what one machine reaches.\n"


def measure(path: Path) -> None:
    """Measure the processor and its memory, in about ten seconds, and write a row of the table of devices.

    Args:
        path: The file.
    """
    import torch
    import yaml

    from experiments.measuring.peaks import measure_peaks

    device = torch.device("cpu")
    first, second = (measure_peaks(device, torch.float32, seconds=1.5) for _ in range(2))
    best = first.better(second)
    threads = torch.get_num_threads()
    row = {
        "title": f"{processor()}, {threads} {'core' if threads == 1 else 'cores'}",
        "memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "bandwidth": float(f"{best.roof.bandwidth:.3g}"),
        "cache": float(best.cache_bytes) or None,
        "flops": {"float32": float(f"{best.flops:.3g}")},
        "source": (
            f"measured on {datetime.date.today()} with PyTorch {torch.__version__} and {threads} threads: the faster "
            f"of a copy and a sum of memory, and a matrix product"
        ),
    }
    path.write_text(HEADER + yaml.safe_dump({"this-machine": row}, sort_keys=False, width=110), encoding="utf-8")


def processor() -> str:
    """Returns what the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
