"""Program traces: which calls a program made, how long they were, what they waited for.

A trace is a JSON Lines file, one program a line, with token counts and times only: no message text.
The form is in ``traces/README.md``. Files may be compressed with xz or gzip.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

FOLDER = Path(__file__).parent / "traces"
LINE_BYTES_MAX = 16 << 20
COUNT_MAX = 1 << 30  # of a token count or an id: far above any model, and safe to compute with
MIXED = ("chat-sharegpt", "bfcl-gt", "lats")  # the paper's "mixed": the same number of each
KINDS = ("chat", "react", "mcts", "coding")
INTERRUPTS = ("tool", "human")

_PROGRAM_FIELDS = frozenset(
    ("program", "source", "kind", "arrival", "shared_prefix", "role_prefixes", "calls")
)
_CALL_FIELDS = frozenset(
    (
        "id", "parents", "prompt_tokens", "output_tokens", "cached_prefix_of", "prefix_tokens",
        "tool_seconds_before", "interrupt", "role", "thread",
    )
)  # fmt: skip


class TraceError(ValueError):
    """A trace cannot be read; the message says file, line number and what is wrong.

    What is wrong is the field, its value, shortened, and what is allowed.
    """


class Prefix(NamedTuple):
    """First tokens that are the same in every program of a group."""

    group: str
    tokens: int


class Call(NamedTuple):
    """One LLM request of a program.

    It may start when all ``parents`` are over, plus ``tool_s``. Its first ``prefix_tokens`` are a
    prefix of prompt + output of the call ``cached_prefix_of``; where a chat template makes it
    longer than that call, the rest is new.
    """

    id: int
    parents: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    cached_prefix_of: int | None
    prefix_tokens: int
    tool_s: float | None  # None: not recorded
    interrupt: str | None
    role: str | None
    thread: str | None

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens


class Program(NamedTuple):
    """One run of an agent; parents stand before their children in ``calls``."""

    name: str
    source: str
    kind: str
    arrival_s: float | None
    shared_prefix: Prefix | None
    role_prefixes: Mapping[str, Prefix]
    calls: tuple[Call, ...]

    @property
    def output_tokens(self) -> int:
        """Tokens that all calls of the program generate."""
        return sum(call.output_tokens for call in self.calls)

    @property
    def largest_tokens(self) -> int:
        """Prompt and output of the largest call: what an engine must have room for."""
        return max(call.tokens for call in self.calls)


def names() -> tuple[str, ...]:
    """Return the names of the traces that ship with the lab, ``mixed`` among them."""
    shipped = (path.name.removesuffix(".jsonl.xz") for path in FOLDER.glob("*.jsonl.xz"))
    return (*sorted(shipped), "mixed")


def load(name_or_path: str) -> tuple[Program, ...]:
    """Return the programs of a shipped trace, of a file, or of ``mixed``.

    Args:
        name_or_path: One of ``names()``, or a path that ends in .jsonl, .jsonl.xz or .jsonl.gz.

    Raises:
        TraceError: there is no such trace, it cannot be unpacked, it is empty, or a line of it is
            wrong.
    """
    if name_or_path == "mixed":
        return mix([load(name) for name in MIXED])
    shipped = FOLDER / f"{name_or_path}.jsonl.xz"
    path = shipped if shipped.is_file() else Path(name_or_path)
    if not path.is_file():
        raise TraceError(f"no trace {name_or_path!r}: neither a file nor one of {names()}")
    programs = tuple(read(lines_of(path), path.name))
    if not programs:
        raise TraceError(f"{path.name}: there is no program in it")
    return programs


def lines_of(path: Path) -> Iterator[str]:
    """Yield a file's lines, unpacked.

    Args:
        path: A text file in UTF-8; .xz and .gz are compressed.

    Raises:
        TraceError: it cannot be unpacked or decoded, or a line is too long; with the line's number.
    """
    number = 1
    try:
        with _open(path, "rb") as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(f"{path.name}:{number}: longer than {LINE_BYTES_MAX} bytes")
                yield line.decode("utf-8")
                number += 1
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}:{number}: not UTF-8: {error.reason}") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TraceError(f"{path.name}:{number}: cannot be read: {error}") from None


def mix(sets: Sequence[Sequence[Program]], seed: int = 0) -> tuple[Program, ...]:
    """Return the same number of programs from each set, shuffled."""
    randomness = random.Random(seed)
    count = min(len(programs) for programs in sets)
    mixed = [p for programs in sets for p in randomness.sample(list(programs), count)]
    randomness.shuffle(mixed)
    return tuple(mixed)


def read(lines: Iterable[str], file: str) -> Iterator[Program]:
    """Yield the programs in ``lines``, checked.

    Args:
        lines: JSON texts; empty ones are skipped.
        file: The name that errors give.

    Raises:
        TraceError: a line is wrong; its number counts from 1.
    """
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if len(line) > LINE_BYTES_MAX:
                raise TraceError(f"longer than {LINE_BYTES_MAX} characters")
            program = _program(_parsed(line))
            if program.name in seen:
                raise TraceError(f"program {_shown(program.name)} stands twice")
        except TraceError as error:
            raise TraceError(f"{file}:{number}: {error}") from None
        seen.add(program.name)
        yield program


def write(programs: Iterable[Program], path: Path) -> int:
    """Write programs in the shipped form and return how many; .xz and .gz are compressed."""
    count = 0
    with _open(path, "wb") as file:
        for program in programs:
            line = json.dumps(to_json(program), separators=(",", ":")) + "\n"
            file.write(line.encode("utf-8"))
            count += 1
    return count


def to_json(program: Program) -> dict[str, Any]:
    """Return the program as one line's object."""
    line: dict[str, Any] = {
        "program": program.name,
        "source": program.source,
        "kind": program.kind,
        "arrival": program.arrival_s,
        "shared_prefix": program.shared_prefix and program.shared_prefix._asdict(),
    }
    if program.role_prefixes:
        line["role_prefixes"] = {r: p._asdict() for r, p in program.role_prefixes.items()}
    line["calls"] = [_call_to_json(call) for call in program.calls]
    return line


def _call_to_json(call: Call) -> dict[str, Any]:
    line = call._asdict()
    line["parents"] = list(call.parents)
    line["tool_seconds_before"] = line.pop("tool_s")
    optional = ("interrupt", "role", "thread")
    return {k: v for k, v in line.items() if v is not None or k not in optional}


def _open(path: Path, mode: str) -> IO[bytes]:
    if path.suffix == ".xz":
        return cast("IO[bytes]", lzma.open(path, mode))
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, mode))
    return cast("IO[bytes]", path.open(mode))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise TraceError(f"not JSON: {error}") from None


def _program(line: Any) -> Program:
    if not isinstance(line, dict):
        raise TraceError("a program is a JSON object")
    if unknown := sorted(set(line) - _PROGRAM_FIELDS):
        raise TraceError(f"unknown fields {_shown(unknown)}")
    name = _field(line, "program", str)
    if not name:
        raise TraceError("program is '': a program has a name")
    kind = _field(line, "kind", str)
    if kind not in KINDS:
        raise TraceError(f"kind is {_shown(kind)}, not one of {KINDS}")
    arrival_s = _seconds(line, "arrival")
    calls: dict[int, Call] = {}
    for place, call_line in enumerate(_field(line, "calls", list)):
        try:
            call = _call(call_line, calls)
        except TraceError as error:
            raise TraceError(f"call {place}: {error}") from None
        calls[call.id] = call
    if not calls:
        raise TraceError("a program has at least one call")
    roles = _optional(line, "role_prefixes", dict) or {}
    prefixes = {role: _prefix(v, f"role_prefixes {_shown(role)}") for role, v in roles.items()}
    return Program(
        name=name,
        source=_field(line, "source", str),
        kind=kind,
        arrival_s=arrival_s,
        shared_prefix=_prefix(line.get("shared_prefix"), "shared_prefix"),
        role_prefixes={role: p for role, p in prefixes.items() if p is not None},
        calls=tuple(calls.values()),
    )


def _call(line: Any, before: Mapping[int, Call]) -> Call:
    if not isinstance(line, dict):
        raise TraceError("a call is a JSON object")
    if unknown := sorted(set(line) - _CALL_FIELDS):
        raise TraceError(f"unknown fields {_shown(unknown)}")
    call = Call(
        id=_field(line, "id", int),
        parents=tuple(_field(line, "parents", list)),
        prompt_tokens=_field(line, "prompt_tokens", int),
        output_tokens=_field(line, "output_tokens", int),
        cached_prefix_of=_optional(line, "cached_prefix_of", int),
        prefix_tokens=_field(line, "prefix_tokens", int),
        tool_s=_seconds(line, "tool_seconds_before"),
        interrupt=_optional(line, "interrupt", str),
        role=_optional(line, "role", str),
        thread=_optional(line, "thread", str),
    )
    _check_call(call, before)
    return call


def _check_call(call: Call, before: Mapping[int, Call]) -> None:
    if call.id in before:
        raise TraceError(f"id {call.id} stands twice")
    for parent in call.parents:
        if not isinstance(parent, int) or isinstance(parent, bool):
            raise TraceError(f"parents has {_shown(parent)}, not int, the id of a call")
    if missing := [parent for parent in call.parents if parent not in before]:
        raise TraceError(f"parents {_shown(missing)} do not stand before it")
    if call.prompt_tokens < 1 or call.output_tokens < 1:
        raise TraceError(
            f"prompt_tokens {call.prompt_tokens} and output_tokens {call.output_tokens} "
            "must be at least 1"
        )
    if not 0 <= call.prefix_tokens <= call.prompt_tokens:
        raise TraceError(
            f"prefix_tokens {call.prefix_tokens} is not in 0..prompt_tokens {call.prompt_tokens}"
        )
    if call.cached_prefix_of is not None and call.cached_prefix_of not in before:
        raise TraceError(f"cached_prefix_of {call.cached_prefix_of} does not stand before it")
    if call.interrupt is not None and call.interrupt not in INTERRUPTS:
        raise TraceError(f"interrupt is {_shown(call.interrupt)}, not one of {INTERRUPTS}")


def _prefix(value: Any, where: str) -> Prefix | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"group", "tokens"}:
        raise TraceError(f"{where} is {_shown(value)}, but has group and tokens, and nothing else")
    try:
        return Prefix(_field(value, "group", str), _field(value, "tokens", int))
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None


_T = TypeVar("_T")


def _field(line: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    if name not in line:
        raise TraceError(f"{name} is missing")
    value = line[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(f"{name} is {_shown(value)}, not {kind.__name__}")
    if isinstance(value, int) and not 0 <= value <= COUNT_MAX:
        raise TraceError(f"{name} is {_shown(value)}, not in 0..{COUNT_MAX}")
    return value


def _optional(line: Mapping[str, Any], name: str, kind: type[_T]) -> _T | None:
    return None if line.get(name) is None else _field(line, name, kind)


def _seconds(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise TraceError(
            f"{name} is {_shown(value)}, not null and no number of seconds from 0 to below 1e9"
        )
    return float(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


def _shown(value: object) -> str:
    """Return a value as an error shows it: in Python's form, long ones cut in the middle."""
    return _SHORT.repr(value)
