"""One process table for several gateways, by way of Redis.

Theory of operation. Every gateway holds the whole table and answers from it alone: no call waits
for Redis. Twice a second it writes what has changed at its place and reads what has changed
elsewhere.

What a gateway has charged to a program it writes as an absolute figure under its own name, one
field of the program's hash for each measure; a program's service is the sum over the gateways, or
the longest of their paths. It leaves out what it has read of others, which would come back to them
as more than they said. So nothing is lost or charged twice when a write fails or is repeated,
and when Redis was away the next write puts everything right: meanwhile each gateway goes on with
what it knows. What a gateway had charged stays there when it dies.

Changes are found by a counter that grows with each write and a sorted set of ids by that counter;
both move in one script, so a reader misses nothing. Another epoch than before means that Redis has
lost its memory: then everything is written and read again.

A lease is the latest that any gateway knows. Whether a program has ended is written only by the
gateway where that changed. Homes are kept by address, and only those that every gateway can reach.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from autellix.errors import ConfigError

from ..accounts import Charged
from ..process_table import TOMBSTONE_S
from ..program import Elsewhere, Program
from ..types import EngineAddress
from .record import more_of, remembered, take_more, take_wishes, wishes_of
from .responses import ResponseHome
from .state import Gateway

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.4
IO_S: Final = 2.0  # Redis is away if it takes longer
KEEP_OPEN_S: Final = 86_400
INDEX_MAX: Final = 200_000
PREFIX: Final = "autellix:1:"
_CLOCK, _INDEX, _EPOCH = f"{PREFIX}clock", f"{PREFIX}index", f"{PREFIX}epoch"
_CHUNK: Final = 200
#: Counts one write and puts what it is about at that place of the index; says where it was before.
_NOTE: Final = """
local told = {redis.call('INCR', KEYS[1])}
for i, id in ipairs(ARGV) do
  told[i + 1] = redis.call('ZSCORE', KEYS[2], id) or '0'
  redis.call('ZADD', KEYS[2], told[1], id)
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -ARGMAX)
return told
""".replace("ARGMAX", str(INDEX_MAX + 1))

_Thing = TypeVar("_Thing")
_AWAY: Final = (RedisError, OSError, TimeoutError)


class SharedState:
    """One gateway's end of the shared table; see the module's theory of operation."""

    def __init__(self, url: str, gateway: Gateway) -> None:
        """Prepare; nothing is connected yet.

        Raises:
            ConfigError: the URL cannot be meant.
        """
        self._gateway = gateway
        self._table = gateway.table
        self._homes = gateway.homes
        self._homes.watch()
        self._name = secrets.token_hex(6)
        self._epoch: Any = ""  # of Redis's memory
        self._seen = 0  # all changes up to here have been read
        self._mine: set[int] = set()  # counts of own writes, not read yet
        self._covered: dict[str, None] = {}  # unread changes whose place an own write has taken
        self._ended: dict[str, bool] = {}  # whether a program has ended, as Redis knows
        self._failing = False
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url, decode_responses=True, socket_timeout=IO_S, socket_connect_timeout=IO_S,
                retry=Retry(NoBackoff(), 0), health_check_interval=0,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"state: {error}; allowed is redis://HOST:PORT/DB") from error
        self._note = self._redis.register_script(_NOTE)

    async def restore(self) -> int:
        """Read what there is; a Redis that is away is waited for in the background."""
        before = len(self._table)
        await self.flush()
        return len(self._table) - before

    async def run(self) -> None:
        """Write and read what changes until cancelled."""
        task = asyncio.current_task()
        for turn in itertools.count(1):
            await asyncio.sleep(PERIOD_S)
            await self.flush()
            if task is not None and task.cancelling():
                return  # the client has taken a cancellation for a time-out of its own
            if turn % 256 == 0:
                self._forget()

    async def flush(self) -> None:
        """Write what has changed here, read what has changed elsewhere."""
        clock = self._gateway.clock
        changed = [
            pair for pair in self._table.take_changed(clock.now_s()) if pair[0].session is not None
        ]
        homes = [
            (i, h) for i, h in self._homes.take_changed() if h.address.uds is None
        ]  # others cannot reach a unix socket
        try:
            await self._write(changed, homes)
            await self._read()
        except asyncio.CancelledError:
            self._put_back(changed, homes)
            raise
        except _AWAY as error:
            self._put_back(changed, homes)
            self._gateway.count("shared state away")
            if not self._failing:
                _log.warning("the shared state is away, going on alone: %s", error)
            self._failing = True
        else:
            if self._failing:
                _log.info("the shared state is back")
            self._failing = False

    def _put_back(
        self,
        changed: Sequence[tuple[Program, Charged]],
        homes: Sequence[tuple[str, ResponseHome]],
    ) -> None:
        self._table.put_back(program for program, _ in changed)
        self._homes.put_back(response_id for response_id, _ in homes)

    async def close(self) -> None:
        """Hang up."""
        await self._redis.aclose()

    async def _write(
        self,
        changed: Sequence[tuple[Program, Charged]],
        homes: Sequence[tuple[str, ResponseHome]],
    ) -> None:
        for told in _chunks(changed):
            some = await self._recalled(told)
            async with self._redis.pipeline(transaction=False) as pipe:
                for program, charged in some:
                    key = _program_key(program.program_id)
                    pipe.hset(key, mapping=self._fields(program, charged))  # type: ignore[arg-type]
                    over = program.is_tombstone and program.ended_s is not None
                    pipe.expire(key, int(TOMBSTONE_S) if over else KEEP_OPEN_S)
                await pipe.execute()
            await self._tell([f"p{program.program_id}" for program, _ in some])
            for program, _ in some:
                self._ended[program.program_id] = program.ended_s is not None
        for some_homes in _chunks(homes):
            async with self._redis.pipeline(transaction=False) as pipe:
                for response_id, home in some_homes:
                    value = orjson.dumps([tuple(home.address), home.scope, home.program_session])
                    pipe.set(f"{PREFIX}r{response_id}", value, ex=KEEP_OPEN_S)
                await pipe.execute()
            await self._tell([f"r{response_id}" for response_id, _ in some_homes])

    async def _recalled(
        self, changed: Sequence[tuple[Program, Charged]]
    ) -> list[tuple[Program, Charged]]:
        """Add to programs that are new here what Redis knows of them, before it is written over.

        Such a one was here before, and the table had no room to remember it, or it began at
        another gateway and has come here before that was read.
        """
        new = [program for program, _ in changed if program.elsewhere is None]
        if not new:
            return list(changed)
        async with self._redis.pipeline(transaction=False) as pipe:
            for program in new:
                pipe.hgetall(_program_key(program.program_id))
            answers = dict(zip(new, await pipe.execute(), strict=True))
        recalled = []
        for program, charged in changed:
            fields = answers.get(program, {})
            try:
                own = self._recall(program, fields) if fields else Charged()
            except ValueError:
                self._gateway.count("shared state malformed")
                own = Charged()
            sum_s = charged.sum_s + own.sum_s
            path_s = max(charged.path_s, own.path_s)
            wait_path_s = max(charged.wait_path_s, own.wait_path_s)
            recalled.append((program, Charged(sum_s, path_s, wait_path_s)))
            program.elsewhere = program.elsewhere or Elsewhere()
        return recalled

    def _recall(self, program: Program, fields: Mapping[str, str]) -> Charged:
        """Charge a program with what this gateway once had, and return that."""
        own, wait_s, calls = self._own(fields)
        program.account.recall(own)
        program.wait_s += wait_s
        program.calls_begun += calls
        program.calls_ended += calls
        self._charge(program, fields)
        return own

    async def _tell(self, ids: Sequence[str]) -> None:
        """Let others know of a write."""
        told = await self._note(keys=[_CLOCK, _INDEX], args=ids)
        self._mine.add(int(told[0]))
        for item, before in zip(ids, told[1:], strict=True):
            if (at := int(float(before))) > self._seen and at not in self._mine:
                self._covered[item] = None

    def _fields(self, program: Program, charged: Charged) -> dict[str, Any]:
        clock, name = self._gateway.clock, self._name
        unix_s = clock.unix_s() - clock.now_s()  # of the clock's nought
        lease_s = program.lease_until_s
        if program.in_flight:
            lease_s = clock.now_s() + (program.ttl_s or self._table.lease_s)
        elsewhere = program.elsewhere or Elsewhere()
        fields: dict[str, Any] = {
            "scope": program.scope, "session": program.session, "name": program.name,
            "arrival": unix_s + program.arrival_s,
            f"s:{name}": charged.sum_s, f"p:{name}": charged.path_s,
            f"e:{name}": program.account.path.own().service_s,
            f"w:{name}": program.wait_s - elsewhere.wait_s, f"q:{name}": charged.wait_path_s,
            f"c:{name}": program.calls_begun - elsewhere.calls, "more": more_of(program),
            "conversation": program.conversation or "", "parent": program.parent_session or "",
            "wishes": orjson.dumps(wishes_of(program)),
        }  # fmt: skip
        if not program.is_tombstone:  # whose lease is for how long it is remembered here
            fields["lease"] = unix_s + lease_s
        if (program.ended_s is not None) != self._ended.get(program.program_id, False):
            fields["end"] = "" if program.ended_s is None else program.end_reason or "ok"
        home = next(
            (e.address for e in self._gateway.engines.all() if e.engine_id == program.home), None
        )
        if home is not None and home.uds is None:
            fields["home"] = f"{home.host}:{home.port}"
        return fields

    async def _read(self) -> None:
        """Read what others have written since the last time."""
        await self._redis.set(_EPOCH, secrets.token_hex(8), nx=True)
        epoch, clock_text = await self._redis.mget(_EPOCH, _CLOCK)
        clock = int(clock_text or 0)
        if epoch != self._epoch:
            if self._epoch:
                _log.warning("the shared state has been lost; writing it again")
                self._table.put_back(p for p in self._table.programs() if p.session is not None)
            self._epoch, self._seen = epoch, 0
            self._mine.clear()
            self._ended.clear()
        covered = list(self._covered)
        for some in _chunks(covered):
            await self._fetch(some)
            for item in some:
                self._covered.pop(item, None)
        while True:
            found: Any = await self._redis.zrange(
                _INDEX, f"({self._seen}", "+inf", byscore=True, withscores=True,
                offset=0, num=_CHUNK * 5,
            )  # fmt: skip
            if not found:
                self._seen = max(self._seen, clock)
                break
            last = int(found[-1][1])
            if len(found) == _CHUNK * 5:  # the rest of its last write may be behind the edge
                whole = [pair for pair in found if int(pair[1]) < last]
                found, last = (whole, last - 1) if whole else (found, last)
            news: list[str] = [item for item, at in found if int(at) not in self._mine]
            for some in _chunks(news):
                await self._fetch(some)
            self._seen = last
        self._mine = {at for at in self._mine if at > self._seen}

    async def _fetch(self, items: Sequence[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for item in items:
                if item[0] == "p":
                    pipe.hgetall(_program_key(item[1:]))
                else:
                    pipe.get(PREFIX + item)
            answers = await pipe.execute()
        for item, answer in zip(items, answers, strict=True):
            if not answer:
                continue  # it has run out meanwhile
            try:
                if item[0] == "p":
                    self._merge(item[1:], answer)
                else:
                    self._take_home(item[1:], answer)
            except (KeyError, ValueError, TypeError):
                self._gateway.count("shared state malformed")

    def _merge(self, program_id: str, fields: Mapping[str, str]) -> None:
        """Put into the table what is known of a program elsewhere."""
        clock, table = self._gateway.clock, self._table
        now_s = clock.now_s()
        unix_s = clock.unix_s() - now_s
        lease_until_s = float(fields.get("lease", 0)) - unix_s
        ended = bool(fields.get("end"))
        program = table.get(program_id)
        if program is None:
            if ended or lease_until_s <= now_s:
                return
            program = remembered(
                program_id=program_id, scope=fields["scope"], session=fields["session"],
                name=fields["name"], age_s=clock.unix_s() - float(fields["arrival"]), now_s=now_s,
            )  # fmt: skip
            take_more(program, fields["more"])
            if not table.restore(program, Charged(), now_s):
                return
        if program.elsewhere is None:
            self._recall(program, fields)
        else:
            self._charge(program, fields)
        program.name = fields["name"] if program.name == program.session else program.name
        program.conversation = program.conversation or fields["conversation"] or None
        program.parent_session = program.parent_session or fields["parent"] or None
        is_news = ended != (program.ended_s is not None)
        if is_news and self._ended.get(program_id, False) == (program.ended_s is not None):
            if ended:
                table.end_program(program, fields["end"], now_s)
            else:
                table.open_program(program.scope, fields["session"], now_s, reopen=True)
        self._ended[program_id] = ended
        if not ended and program.ended_s is None:
            take_wishes(program, orjson.loads(fields.get("wishes", "null")))
        table.renew_until(program, lease_until_s, now_s)
        for engine in self._gateway.engines.all():
            if f"{engine.address.host}:{engine.address.port}" == fields.get("home"):
                program.home = engine.engine_id

    def _charge(self, program: Program, fields: Mapping[str, str]) -> None:
        """Set what other gateways have charged a program."""
        sum_s, wait_s = (sum(self._others(fields, kind)) for kind in ("s:", "w:"))
        paths = self._with_paths(fields)
        path_s = max(self._others(paths, "p:"), default=0.0)
        ended = {f"e:{key[2:]}": value for key, value in paths.items() if key.startswith("p:")}
        ended_path_s = max(self._others({**ended, **fields}, "e:"), default=0.0)
        wait_path_s = max(self._others(fields, "q:"), default=0.0)
        calls = int(sum(self._others(fields, "c:")))
        program.account.note_elsewhere(Charged(sum_s, path_s, wait_path_s), ended_path_s)
        before = program.elsewhere or Elsewhere()
        program.wait_s += wait_s - before.wait_s
        program.calls_begun += calls - before.calls
        program.calls_ended += calls - before.calls
        program.elsewhere = Elsewhere(wait_s, calls)

    def _own(self, fields: Mapping[str, str]) -> tuple[Charged, float, int]:
        """Return what this gateway has charged a program, its wait and its calls."""
        sum_s, path_s, wait_path_s, wait_s, calls = (
            float(fields.get(kind + self._name, 0.0)) for kind in ("s:", "p:", "q:", "w:", "c:")
        )
        return Charged(sum_s, path_s, wait_path_s), wait_s, int(calls)

    def _with_paths(self, fields: Mapping[str, str]) -> Mapping[str, str]:
        """Return the fields with a path of each gateway that charges by paths.

        One of a version that kept one measure only wrote it as the sum, whatever it was.
        """
        if self._table.accounting != "atlas":
            return fields
        sums = {f"p:{name[2:]}": value for name, value in fields.items() if name.startswith("s:")}
        return {**sums, **fields}

    def _others(self, fields: Mapping[str, str], kind: str) -> Iterator[float]:
        own = kind + self._name
        return (float(v) for k, v in fields.items() if k.startswith(kind) and k != own)

    def _take_home(self, response_id: str, text: str) -> None:
        address, scope, session = orjson.loads(text)
        where = EngineAddress(*address)
        for engine in self._gateway.engines.all():
            if engine.address == where:
                home = ResponseHome(engine.engine_id, where, scope, session)
                self._homes.put(response_id, home, is_news=False)

    def _forget(self) -> None:
        """Forget what the table has forgotten."""
        for program_id in [i for i in self._ended if self._table.get(i) is None]:
            del self._ended[program_id]


def _program_key(program_id: str) -> str:
    return f"{PREFIX}p{program_id}"


def _chunks(things: Sequence[_Thing]) -> Iterator[Sequence[_Thing]]:
    """Yield them in runs that are short enough for calls to go on in between."""
    for start in range(0, len(things), _CHUNK):
        yield things[start : start + _CHUNK]
