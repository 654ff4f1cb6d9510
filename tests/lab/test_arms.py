"""The arms of the lab: what each one is stands in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autellix.server.lab import arms
from autellix.server.lab.coarse_engine import ORDERS

DOCUMENT = Path(__file__).parents[2] / "docs" / "lab.md"


def table_names() -> set[str]:
    """Return the names in the first column of the policy table, a table without a gap."""
    section = DOCUMENT.read_text(encoding="utf-8").split("\n## Policies\n")[1].split("\n## ")[0]
    table = section.strip().split("\n\n")[0].splitlines()
    assert table[0].startswith("| name |")
    return {name for row in table[2:] for name in re.findall("`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize("name", [*arms.names(), *ORDERS])
def test_every_arm_has_a_row_in_the_policy_table(name: str):
    """An arm that nobody can look up is no baseline."""
    assert name in table_names()


def test_the_policy_table_names_no_arm_that_is_not_there():
    """What the table names can be run."""
    plain = {name for name in table_names() if ":" not in name}
    assert plain == {*arms.names(), *ORDERS}
