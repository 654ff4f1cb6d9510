"""The control channel, both ends: every report arrives once and in order, or is counted as lost."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.channel import (
    Accounting,
    Bye,
    CallReport,
    Heartbeat,
    Hello,
    PolicyWanted,
    Resend,
    SessionEnded,
    digest_settings,
    encode,
)
from autellix.server.clock import ManualClock, SystemClock
from autellix.server.engine import control as engine_end
from autellix.server.engine.control import ChannelSettings, EngineChannel
from autellix.server.pool.control import POLICY_REFUSALS_MAX, RESENDS_MAX, ControlServer


def report(seq: int, service_s: float = 1.0) -> CallReport:
    return CallReport(
        seq=seq,
        call_id=f"{seq:08x}",
        program_id="0badcafe",
        request_id=f"r{seq}",
        reason="stop",
        service_s=service_s,
        wait_s=0.0,
        preemptions=0,
        swaps=0,
        prompt_tokens=1,
        hit_tokens=0,
        output_tokens=1,
        level=1,
    )


def hello(boot_id: str = "b1", engine_id: str = "e0", policy: str = "plas", **more) -> Hello:
    return Hello(
        version=1,
        engine_id=engine_id,
        boot_id=boot_id,
        rank=0,
        pid=1,
        vllm_version="0",
        scheduler="S",
        policy=policy,
        async_scheduling=False,
        slots=4,
        kv_blocks=64,
        block_tokens=16,
        **more,
    )


def heartbeat(boot_id: str = "b1", last_seq: int = 0, step: int = 0) -> Heartbeat:
    return Heartbeat(
        boot_id=boot_id,
        last_seq=last_seq,
        step=step,
        step_age_s=None,
        longest_step_s=0.0,
        running=0,
        waiting=0,
        kv_blocks_free=0,
        computed_tokens=0,
        recomputed_tokens=0,
        preemptions=0,
        level_waiting=(),
    )


class Ends:
    """A server without a socket, and what it would have sent."""

    def __init__(self, **server_args) -> None:
        self.clock = ManualClock()
        self.got: list[tuple[str, str, int]] = []
        self.sent: list[object] = []
        self.server = ControlServer(
            "inproc://none",
            self.clock,
            lambda engine_id, boot_id, r: self.got.append((engine_id, boot_id, r.seq)),
            **server_args,
        )

        async def send(identity: bytes, message: object) -> None:
            self.sent.append(message)

        self.server._send = send

    async def say(self, message: object, identity: bytes = b"p") -> None:
        await self.server.handle(identity, message)


async def test_reports_arrive_once_and_in_order():
    """A duplicate is ignored; a report that came early waits for the one before it."""
    ends = Ends()
    await ends.say(hello())
    await ends.say(Accounting(boot_id="b1", reports=(report(1), report(3), report(1))))
    assert [seq for *_, seq in ends.got] == [1]
    assert [m for m in ends.sent if isinstance(m, Resend)] == [
        Resend(boot_id="b1", first_seq=2, last_seq=2)
    ]
    await ends.say(Accounting(boot_id="b1", reports=(report(2),)))
    assert ends.got == [("e0", "b1", 1), ("e0", "b1", 2), ("e0", "b1", 3)]
    assert ends.server.lost == 0


async def test_a_gap_at_the_end_is_seen_by_the_heartbeat():
    """The last report may be the lost one: the heartbeat says which is the newest."""
    ends = Ends()
    await ends.say(hello())
    await ends.say(heartbeat(last_seq=2))
    assert ends.sent == [Resend(boot_id="b1", first_seq=1, last_seq=2)]


async def test_what_never_comes_is_counted_as_lost_and_the_rest_is_delivered():
    """After some requests in vain the gap is given up, and named."""
    ends = Ends()
    await ends.say(hello())
    await ends.say(Accounting(boot_id="b1", reports=(report(4),)))
    for _ in range(RESENDS_MAX + 1):
        ends.clock.advance(1.0)
        await ends.say(heartbeat(last_seq=4))
    assert [seq for *_, seq in ends.got] == [4]
    assert ends.server.lost == 3


async def test_a_new_boot_begins_at_one_and_the_old_one_is_retired():
    """An engine that was restarted numbers anew; what its former life owes is lost."""
    ends = Ends()
    await ends.say(hello("b1"))
    await ends.say(Accounting(boot_id="b1", reports=(report(1), report(3))))
    await ends.say(hello("b2"), identity=b"q")
    await ends.say(Accounting(boot_id="b2", reports=(report(1),)), identity=b"q")
    assert ends.got == [("e0", "b1", 1), ("e0", "b1", 3), ("e0", "b2", 1)]
    assert ends.server.lost == 1
    assert ends.server.peers()["e0"].hello.boot_id == "b2"


async def test_a_peer_speaks_for_its_own_engine_only():
    """Another engine id, another boot id, or no hello at all: nothing is believed."""
    ends = Ends(engine_ids=["e0"])
    await ends.say(Accounting(boot_id="b1", reports=(report(1),)))
    await ends.say(hello())
    await ends.say(hello(engine_id="e1"))
    await ends.say(Accounting(boot_id="b9", reports=(report(1),)))
    await ends.say(hello("b2", "e7"), identity=b"stranger")
    assert ends.got == []
    assert ends.server.foreign == 3
    assert list(ends.server.peers()) == ["e0"]


async def test_after_bye_nothing_is_expected():
    """A peer that left in good order is gone, without a loss."""
    ends = Ends()
    await ends.say(hello())
    await ends.say(Accounting(boot_id="b1", reports=(report(1),)))
    await ends.say(Bye(boot_id="b1"))
    assert ends.server.peers() == {}
    assert ends.server.lost == 0


@pytest.mark.parametrize("policy", ["atlas", "plas"])
async def test_a_policy_that_was_lost_is_sent_again_once_a_second(policy: str):
    """The engine works on and has not answered; of the same name it may have other settings."""
    ends = Ends()
    await ends.say(hello())
    await ends.server.set_policy({"policy": policy, "beta": 4})
    wanted = PolicyWanted(settings={"policy": policy, "beta": 4})
    assert ends.sent == [wanted]
    for step in range(1, 13):
        ends.clock.advance(0.25)
        await ends.say(heartbeat(step=step))
    assert ends.sent == [wanted] * 4
    await ends.say(hello(policy=policy))
    for step in range(13, 25):
        ends.clock.advance(0.25)
        await ends.say(heartbeat(step=step))
    assert ends.sent == [wanted] * 4


async def test_an_answer_to_an_earlier_policy_is_none_to_a_later_one():
    """Two switches in a row, of which the second is lost."""
    ends = Ends()
    await ends.say(hello())
    await ends.server.set_policy({"policy": "atlas"})
    await ends.server.set_policy({"policy": "fcfs"})
    await ends.say(hello(policy="atlas"))
    ends.clock.advance(1.0)
    await ends.say(heartbeat(step=1))
    assert [m.settings["policy"] for m in ends.sent] == ["atlas", "fcfs", "fcfs"]


async def test_two_settings_of_one_policy_are_told_apart():
    """The second message is lost, and the answer to the first one comes after it was sent."""
    ends = Ends()
    await ends.say(hello(settings_digest=""))
    first, second = {"policy": "plas", "beta": 8}, {"policy": "plas", "beta": 4}
    await ends.server.set_policy(first)
    await ends.server.set_policy(second)
    await ends.say(hello(settings_digest=digest_settings(first)))
    ends.clock.advance(1.0)
    await ends.say(heartbeat(step=1))
    assert [m.settings["beta"] for m in ends.sent] == [8, 4, 4]
    await ends.say(hello(settings_digest=digest_settings(second)))
    for step in range(2, 9):
        ends.clock.advance(1.0)
        await ends.say(heartbeat(step=step))
    assert [m.settings["beta"] for m in ends.sent] == [8, 4, 4]


async def refuse(ends: Ends, steps: range, **answer) -> None:
    """Work on, a step a second, and answer each policy that comes with the same hello."""
    for step in steps:
        answered = len(ends.sent)
        ends.clock.advance(1.0)
        await ends.say(heartbeat(answer.get("boot_id", "b1"), step=step))
        if len(ends.sent) > answered:
            await ends.say(hello(**answer))


@pytest.mark.parametrize("digest", [None, ""])
async def test_an_engine_that_refuses_a_policy_is_left_alone(digest, caplog):
    """It is asked a few times, which one line in the log says; a new policy or boot begins anew."""
    ends = Ends()
    await ends.say(hello(settings_digest=digest))
    with caplog.at_level(logging.WARNING):
        await ends.server.set_policy({"policy": "atlas"})
        await ends.say(hello(settings_digest=digest))
        await refuse(ends, range(1, 30), settings_digest=digest)
        assert len(ends.sent) == POLICY_REFUSALS_MAX
        assert [r.message for r in caplog.records] == [
            "engine e0 keeps its policy plas and is not asked again for {'policy': 'atlas'}; "
            "its log says why"
        ]
        await ends.server.set_policy({"policy": "fcfs"})
        await ends.say(hello(settings_digest=digest))
        await refuse(ends, range(30, 60), settings_digest=digest)
        assert (len(ends.sent), len(caplog.records)) == (2 * POLICY_REFUSALS_MAX, 2)
        again = {"boot_id": "b2", "settings_digest": digest}
        await ends.say(hello(**again))
        await ends.say(hello(**again))
        await refuse(ends, range(1, 30), **again)
        assert (len(ends.sent), len(caplog.records)) == (3 * POLICY_REFUSALS_MAX, 3)


async def test_an_engine_without_work_is_told_once():
    """It reads its messages when it makes a step, and must not find hundreds of them."""
    ends = Ends()
    await ends.say(hello())
    await ends.say(heartbeat(step=7))
    await ends.server.set_policy({"policy": "atlas"})
    for _ in range(20):
        ends.clock.advance(1.0)
        await ends.say(heartbeat(step=7))
    assert len(ends.sent) == 1
    await ends.say(heartbeat(step=8))
    assert len(ends.sent) == 2


async def test_without_a_switch_no_engine_is_told_anything():
    """Each has the policy that it was started with."""
    ends = Ends()
    await ends.say(hello())
    for step in range(8):
        ends.clock.advance(1.0)
        await ends.say(heartbeat(step=step))
    assert ends.sent == []


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_service_is_right_or_the_loss_is_reported(data):
    """Random loss, doubling and order: delivered + lost = sent, each at most once, in order."""
    total = data.draw(st.integers(1, 30))
    messages = data.draw(
        st.lists(st.lists(st.integers(1, total), min_size=1, max_size=6), max_size=30)
    )
    in_ring = set(data.draw(st.lists(st.integers(1, total), max_size=30)))
    ends = Ends()

    async def play() -> None:
        await ends.say(hello())
        for seqs in messages:
            await ends.say(Accounting(boot_id="b1", reports=tuple(map(report, seqs))))
        for _ in range(total * (RESENDS_MAX + 2)):
            ends.clock.advance(1.0)
            ends.sent.clear()
            await ends.say(heartbeat(last_seq=total))
            for wanted in list(ends.sent):
                found = [s for s in range(wanted.first_seq, wanted.last_seq + 1) if s in in_ring]
                if found:
                    await ends.say(Accounting(boot_id="b1", reports=tuple(map(report, found))))

    asyncio.run(play())
    got = [seq for *_, seq in ends.got]
    sent_at_all = {seq for seqs in messages for seq in seqs} | in_ring
    assert got == sorted(set(got))
    assert len(got) + ends.server.lost == total
    assert set(got) == sent_at_all


async def wait_for(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/c"


def channel_of(endpoint: str, engine_id: str = "e0") -> EngineChannel:
    return EngineChannel(
        ChannelSettings(endpoint, engine_id, None),
        lambda boot_id: hello(boot_id, engine_id),
        heartbeat,
    )


async def test_both_ends_over_a_socket(endpoint: str):
    """Hello, reports, heartbeats and the way down, between the real two ends."""
    got: list[int] = []
    beats: list[str] = []
    server = ControlServer(
        endpoint,
        SystemClock(),
        lambda engine_id, boot_id, r: got.append(r.seq),
        lambda engine_id, beat: beats.append(engine_id),
    )
    await server.start()
    channel = channel_of(endpoint)
    channel.start()
    try:
        await wait_for(lambda: "e0" in server.peers())
        for _ in range(1000):
            channel.report(report(0))
        await wait_for(lambda: len(got) == 1000)
        assert got == list(range(1, 1001))
        await wait_for(lambda: beats)
        await server.forget_programs(["0badcafe"])
        await wait_for(lambda: channel.inbox)
        assert channel.inbox.popleft() == SessionEnded(program_ids=("0badcafe",))
    finally:
        channel.close()
        await wait_for(lambda: not server.peers())
        await server.close()


async def test_a_gateway_that_restarts_gets_everything_it_missed(endpoint: str):
    """A new gateway asks who is there, and for every report from the first on."""
    channel = channel_of(endpoint)
    channel.start()
    try:
        for _ in range(300):
            channel.report(report(0))
        for _ in range(2):
            got: list[int] = []
            server = ControlServer(
                endpoint, SystemClock(), lambda e, b, r, got=got: got.append(r.seq)
            )
            await server.start()
            await wait_for(lambda got=got: len(got) == 300)
            await server.close()
    finally:
        channel.close()


async def test_no_gateway_costs_the_step_path_nothing(endpoint: str, monkeypatch):
    """Nobody listens: reports are dropped from a bounded ring, and nothing waits."""
    monkeypatch.setattr(engine_end, "RING_REPORTS", 100)
    channel = channel_of(endpoint)
    channel.start()
    for _ in range(5000):
        channel.report(report(0))
    channel.close()
    assert not channel._thread.is_alive()
    assert len(channel._ring) == 100


async def test_junk_is_counted_and_ignored(endpoint: str):
    """Frames that are no message, or too large, do no harm."""
    import zmq.asyncio

    server = ControlServer(endpoint, SystemClock(), lambda *_: None)
    await server.start()
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(endpoint)
    try:
        await peer.send(b"\xc1 junk")
        await peer.send_multipart([b"a", b"b"])
        await wait_for(lambda: server.malformed == 2)
        await peer.send(encode(hello()))
        await wait_for(lambda: server.peers())
    finally:
        peer.close(0)
        context.term()
        await server.close()
