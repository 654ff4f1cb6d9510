"""The gate set: which cells the project's policy figures are judged on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import tomllib

from . import cost_model
from .measure import Cell, Rule

FILE: Final = Path(__file__).parent / "gate.toml"
CELLS_MAX: Final = 60


def table() -> dict[str, Any]:
    """Return the file as it is."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def cells(seed: int = 0, horizon_s: float | None = None) -> list[tuple[float, Cell]]:
    """Return (rho, cell) for the whole set.

    Args:
        seed: Of all cells.
        horizon_s: 3600 by the measuring rule; None: the set's own.
    """
    content = table()
    rule = Rule().shortened(float(content["horizon_s"]) if horizon_s is None else horizon_s)
    found = []
    for group in content["cells"]:
        profile = cost_model.load(group["profile"])
        for trace in group["traces"]:
            capacity = content["capacity"][group["profile"]][trace]
            for rho in group["rho"]:
                for arm in group["arms"]:
                    cell = Cell(
                        trace=trace,
                        arm=arm,
                        profile=profile,
                        rate_per_s=round(rho * capacity, 6),
                        seed=seed,
                        rule=rule,
                    )
                    found.append((rho, cell))
    assert len(found) <= CELLS_MAX, f"{len(found)} cells"
    return found


def short_cells() -> list[Cell]:
    """Return the four short cells that the test suite runs."""
    test = table()["test"]
    profile = replace(
        cost_model.load(test["profile"]),
        kv_tokens=test["kv_tokens"],
        slots=test["slots"],
        context_tokens_max=test["context_tokens_max"],
    )
    return [
        Cell(
            trace=test["trace"],
            arm=arm,
            profile=profile,
            rate_per_s=rate,
            rule=Rule().shortened(test["horizon_s"]),
        )
        for rate in test["rates_per_s"]
        for arm in test["arms"]
    ]
