"""Every picture of the chapter."""

from experiments.bench.chapter import drawn_costs, drawn_gains
from experiments.bench.chapter.picture import Picture

PICTURES = {
    "chapter_roofline": Picture(drawn_costs.roofline_data, drawn_costs.draw_roofline),
    "chapter_step": Picture(drawn_costs.step_data, drawn_costs.draw_step),
    "chapter_kv": Picture(drawn_costs.kv_data, drawn_costs.draw_kv),
    "chapter_speedup": Picture(drawn_gains.speedup_data, drawn_gains.draw_speedup),
    "chapter_request": Picture(drawn_gains.request_data, drawn_gains.draw_request),
}
"""Every picture, by the name of its file in ``docs/images``."""
