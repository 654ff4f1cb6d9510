"""A gateway in a process of its own, before one engine, until it is killed."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from autellix.server.clock import SystemClock
from autellix.server.gateway.app import create_app, make_runner
from autellix.server.gateway.config import GatewayConfig
from autellix.server.process_table import ProcessTable
from autellix.server.types import EngineAddress

from .fake_engine import FakeEngine, FakePool


async def main(engine_port: str, state: str, port: int) -> None:
    """Serve, and say on which port."""
    clock = SystemClock()
    app = create_app(
        config=GatewayConfig(state=state),
        table=ProcessTable(now_s=clock.now_s()),
        engines=FakePool([FakeEngine("e0", EngineAddress(None, "127.0.0.1", int(engine_port)))]),
        place=lambda call, engines: engines[0],
        clock=clock,
        key=b"a test's channel key",
        forget_programs=lambda programs: None,
        engine_views=list,
    )
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
