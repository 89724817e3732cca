"""The same memory for every method: whoever drafts has fewer pages, because the drafter takes some of it."""

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.session.memory import plan_memory
from experiments.session.methods import methods_of
from specdec.physics.capacity import Served
from specdec.slot_memory import written_bytes


def charge_memory(config: DictConfig, methods: Mapping[str, str]) -> None:
    """Give every method as many pages as ``config.memory`` has room for behind its weights (``setups``).

    Raises:
        ValueError: The caches have no pages, what a method takes is not known, or it leaves too few pages.
    """
    if config.memory is None:
        return
    size = (config.engine.get("cache") or {}).get("page_size")
    if size is None:
        raise ValueError(f"memory={config.memory:g} is divided into pages: give engine=paged, or memory=null")
    pages = {}
    for each in methods_of(config, methods):
        name = each.name if each.drafter is not None else "without a drafter"
        planned = plan_memory(config if each.drafter is not None else each.config, {name: each.drafter})
        if isinstance(planned, str):
            raise ValueError(f"memory={config.memory:g}: {planned}")
        if planned.unknown:
            raise ValueError(f"memory={config.memory:g}: nothing is known of what {each.name} takes, give memory=null")
        served = planned.methods[name]
        pages[each.name] = _pages(config.memory, served, size, planned.rows, planned.length, each.name)
    with open_dict(config):
        for name, count in pages.items():
            own = {"engine": {"cache": {"pages": count}}}
            config.setups[name] = OmegaConf.merge(config.setups.get(name) or {}, own)


def _pages(memory: float, served: Served, size: int, rows: int, length: int, name: str) -> int:
    fixed = served.memory(rows=rows, length=0)
    per_page = size * served.per_position
    longest = -(-length // size)
    count = int((memory - fixed.total) // per_page)
    if count < longest:
        raise ValueError(
            f"memory={memory:g} leaves {name} {max(count, 0)} pages of {size} positions (its weights take "
            f"{written_bytes(fixed.weights + fixed.drafter)}), and a request of engine.max_length={length} needs "
            f"{longest}: give more memory, or a lower engine.max_length"
        )
    return min(count, rows * longest)
