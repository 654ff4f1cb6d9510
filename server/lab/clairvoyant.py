"""References that know the future: what a scheduler could do that knew each program's work.

The clairvoyant reference of a cell is the best of these. It is a reference, not a bound: no order
by remaining work is optimal when the KV cache is short.
"""

from __future__ import annotations

from .cost_model import Profile
from .lab_queue import AdmittingSeat, Key, OrderedSeat
from .run_state import CallRun, ProgramRun


def left_s(run: CallRun) -> float:
    """Return the work that a call's program has left, this call's progress taken off."""
    request = run.request
    done = request.num_output_tokens / run.call.output_tokens if request is not None else 0.0
    return run.program.left_s - run.program.work_s[run.place] * done


def srpt(run: CallRun) -> Key:
    """Order by remaining work: the least mean response."""
    return (left_s(run), run.program.arrival_s, run.arrival_s)


def smith(run: CallRun) -> Key:
    """Order by remaining work x tokens: Smith's rule for the mean of response ÷ tokens."""
    work = left_s(run) * run.program.output_tokens
    return (work, run.program.arrival_s, run.arrival_s)


def program_order(run: CallRun) -> Key:
    """Order by the program's arrival, then the call's."""
    return (run.program.arrival_s, run.arrival_s)


def seat(name: str, profile: Profile) -> OrderedSeat:
    """Return a seat of one of ``arms.CLAIRVOYANT``."""
    if name == "srpt":
        return OrderedSeat(profile, srpt, preempts=True)
    if name == "srpt-smith":
        return OrderedSeat(profile, smith, preempts=True)
    if name == "srpt-admit":
        return AdmittingSeat(
            profile, srpt, door=lambda p: (p.left_s, p.arrival_s), room=true_working_set
        )
    assert name == "pfcfs-admit", name
    return AdmittingSeat(
        profile, program_order, door=lambda p: (p.arrival_s,), room=true_working_set
    )


def true_working_set(program: ProgramRun, _run: CallRun) -> float:
    """Return the most tokens that the program will ever hold at once."""
    return float(program.working_set_tokens)


def seen_working_set(_program: ProgramRun, run: CallRun, headroom_tokens: int = 256) -> float:
    """Return what a scheduler without foresight knows of it: the prompt at hand and some room."""
    return float(run.call.prompt_tokens + headroom_tokens)
