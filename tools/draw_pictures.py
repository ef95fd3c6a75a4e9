"""Draw the pictures of the documents, docs/pictures/*.svg, from the schedules they show.

python tools/draw_pictures.py          tests/test_docs_pictures.py checks that they are up to date
"""

from __future__ import annotations

from pathlib import Path

from penstock.schedule import Costs, Simulation, build, simulate
from penstock.viz import to_svg

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def simulated(name: str, p: int, m: int, v: int | None = None) -> Simulation:
    schedule = build(name, p, m, v)
    return simulate(schedule, Costs.per_rank(v=schedule.num_stages // p))


def uneven() -> Simulation:
    """One stage of four takes twice as long as the others."""
    return simulate(build("1f1b", 4, 8), Costs(f=(1, 2, 1, 1), i=(1, 2, 1, 1), w=(1, 2, 1, 1)))


def pictures() -> dict[str, str]:
    """The text of each file."""
    shown = {
        "sharded": simulated("sharded", 4, 4),
        "gpipe": simulated("gpipe", 4, 4),
        "gpipe-8": simulated("gpipe", 4, 8),
        "1f1b": simulated("1f1b", 4, 8),
        "interleaved": simulated("interleaved", 4, 8, 2),
        "zb_h1": simulated("zb_h1", 4, 8),
        "zbv": simulated("zbv", 4, 8),
        "uneven": uneven(),
    }
    return {f"{name}.svg": to_svg(simulation) for name, simulation in shown.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
