"""What the paper's figures print beside their tables: the gap to SRPT, and whether orders stay."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.paper import figures, single_engine

from .test_report import result


def test_the_gap_to_srpt_stands_beside_the_papers(capsys):
    """Every arm's mean ÷ SRPT's, per trace."""
    results = []
    for trace, (rate_per_s, _) in figures.SRPT_PAPER.items():
        for arm, mean_s in ((single_engine.paper_arm(trace), 0.06), ("srpt", 0.02)):
            results.append({**result(arm, rate_per_s, mean_s), "trace": trace})
    figures.print_srpt(results, Namespace())
    chat, lats = capsys.readouterr().out.splitlines()[-2:]
    assert "SRPT 20.0 ms: plas:level_bounds_s=[5,20,80] 3.00, srpt 1.00" in chat
    assert chat.endswith("the paper's policy 4.9")
    assert "atlas:level_bounds_s=[5,20,80] 3.00" in lats


def test_a_change_that_turns_the_order_round_is_counted(capsys):
    """One of two changed profiles keeps the order of the first."""
    means = {"as it is": (1.0, 2.0), "a x 0.7": (1.0, 3.0), "a x 1.3": (2.0, 1.0)}
    results = [
        {**result(arm, 1.0, mean_s), "profile": profile}
        for profile, pair in means.items()
        for arm, mean_s in zip(("fcfs", "adaptive"), pair, strict=True)
    ]
    figures.print_sensitivity(results, Namespace())
    assert capsys.readouterr().out.endswith("the order stays in 1 of 2 changes\n")


def test_the_cells_of_each_part_are_what_they_say():
    """The gap's cells hold the paper's policy and SRPT on the same seeds."""
    arguments = Namespace(horizon=300.0, seeds=2)
    cells = list(figures.srpt(arguments))
    assert {(c.trace, c.seed) for c in cells if c.arm == "srpt"} == {
        (trace, seed) for trace in figures.SRPT_PAPER for seed in (0, 1)
    }
