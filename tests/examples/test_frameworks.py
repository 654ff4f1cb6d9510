"""The examples of frameworks without an adapter, and of tools: programs, threads and parents."""

from __future__ import annotations

from typing import Any

from autellix.testing import FakeServer

from .example_run import calls_by_session, check_fork, check_program, run, run_python

DSPY_ASKS = (
    "[[ ## topic ## ]]\n{}\n\nRespond with a JSON object in the following order of fields: `fact`."
)


def tools_told(server: FakeServer) -> list[tuple[str, str]]:
    """Return what the server was told of tools, in order."""
    told = [event.body for event in server.events if "tool" in event.body]
    return [(body["tool"], body["event"]) for body in told]


def test_a_react_agent_is_a_program_per_question(server: FakeServer):
    """Think and act twice, then answer: one chain of three calls, and two tools it waited for."""
    for fruit in ("apple", "pear"):
        server.tool_calls_next += [[("price", {"fruit": fruit})], [("multiply", {"a": 6, "b": 7})]]
        server.tool_calls_next.append([])
    assert run("langgraph_react.py", server).count("['price', 'multiply']: echo: 42") == 2
    assert calls_by_session(server) == [3, 3]
    assert [(call.thread, call.seq) for call in server.calls] == [(0, 0), (0, 1), (0, 2)] * 2
    forced = [call.body["tool_choice"] for call in server.calls]
    assert [c if c == "none" else c["function"]["name"] for c in forced] == [
        "price", "multiply", "none",
    ] * 2  # fmt: skip
    assert all(tool["function"]["strict"] for tool in server.calls[0].body["tools"])
    for session in dict.fromkeys(str(call.session) for call in server.calls):
        assert server.wait_event("DELETE", session).path.endswith("reason=ok")
    one = [("price", "start"), ("price", "end"), ("multiply", "start"), ("multiply", "end")]
    assert tools_told(server) == one * 2
    assert {event.body["name"] for event in server.events if event.method == "PUT"} == {"shopping"}


def test_a_debate_forks_in_each_round(server: FakeServer):
    """Both sides at once, twice, each hearing the other; then the judge, who has heard both."""
    question = "Should a town ban cars from its centre?"
    assert "2 rounds; the judge: echo:" in run("autogen_debate.py", server)
    calls = check_program(server, "debate")
    assert len(calls) == 5
    check_fork(calls[:2])
    check_fork(calls[2:4])
    assert calls[4].thread not in {call.thread for call in calls[:4]}
    assert [call.text for call in calls[:4]] == [question] * 2 + [f"echo: {question}"] * 2
    assert calls[4].text.count(f"echo: echo: {question}") == 2


def test_a_hand_off_is_one_program(server: FakeServer):
    """The triage agent's call, then both of the other agent's; the tool is told."""
    server.tool_calls_next += [[("transfer_to_trains", {})], [("next_train", {"town": "Lyon"})]]
    assert "answered by trains: echo: The next train to Lyon" in run(
        "openai_agents_handoff.py", server
    )
    first, *others = check_program(server, "travel desk")
    assert [call.body["messages"][0]["content"][:10] for call in (first, *others)] == [
        "You hand e", "You answer", "You answer",
    ]  # fmt: skip
    assert [(call.thread, call.seq) for call in others] == [(0, 0), (0, 1)]
    assert tools_told(server) == [("timetable", "start"), ("timetable", "end")]


def test_typed_answers_side_by_side(server: FakeServer):
    """Three reviews are three threads, with the type as a schema; then the summary."""
    moods = {"The kettle": ("happy", 5), "It broke": ("angry", 1), "A fine": ("happy", 4)}
    server.answers = Answers(
        {
            f"Rate this review: {begin}": f'{{"mood": "{mood}", "stars": {stars}}}'
            for begin, (mood, stars) in moods.items()
        }
    )
    assert "happy 5, angry 1, happy 4; echo: Customers" in run("pydantic_ai_agent.py", server)
    *reviews, summary = check_program(server, "reviews")
    assert len(reviews) == 3
    check_fork(reviews)
    kinds = {call.body["response_format"]["type"] for call in reviews}
    assert kinds == {"json_schema"}
    assert summary.thread not in {call.thread for call in reviews}
    assert "response_format" not in summary.body


def test_a_dspy_module_is_one_program(server: FakeServer):
    """Three threads of DSPy's own pool are three threads here; the last call is on the root."""
    server.answers = Answers(
        {
            "[[ ## topic ## ]]": '{"fact": "It is big."}',
            "[[ ## facts ## ]]": '{"line": "All are big."}',
        }
    )
    server.together(*(DSPY_ASKS.format(topic) for topic in ("the sun", "the moon", "the sea")))
    assert run("dspy_program.py", server) == "dspy: All are big.\n"
    *facts, line = check_program(server, "almanac")
    assert facts[0].text == DSPY_ASKS.format(facts[0].text.split("\n")[1])
    assert len(facts) == 3
    check_fork(facts)
    kinds = {call.body["response_format"]["type"] for call in (*facts, line)}
    assert kinds == {"json_schema"}
    assert (line.thread, line.seq) == (0, 0)
    assert line.text.count("It is big.") == 3


def test_dspys_own_engine_is_the_documented_limit(server: FakeServer):
    """It opens sockets past every HTTP client: were it tagged one day, the guide would be wrong."""
    code = (
        "import os, autellix, dspy\n"
        "url = os.environ['OPENAI_BASE_URL']\n"
        "lm = dspy.LM('openai/fake', engine='lm15', api_base=url, api_key='k', cache=False)\n"
        "lm('hello')"
    )
    run_python(["-c", code], server)
    assert [(call.text, call.session) for call in server.calls] == [("hello", None)]


def test_ag2_agents_are_one_program(server: FakeServer):
    """The planner, two answers of the guide at the same time, the planner again."""
    assert "ag2: 2 places" in run("ag2_agents.py", server)
    plan, *described, last = check_program(server, "day trip")
    assert len(described) == 2
    assert described[0].thread != described[1].thread
    assert len({call.parent for call in described}) == 1
    assert last.thread == 0
    assert "echo: Describe the castle." in last.text
    assert plan.body["messages"][0]["content"] == "You plan day trips."


def test_agent_framework_agents_are_one_program(server: FakeServer):
    """Draft, two reviews at the same time, and the rewritten draft: the exact diamond."""
    assert "agent framework: 2 reviews" in run("agent_framework_agents.py", server)
    draft, *reviews, final = check_program(server, "poster")
    assert (draft.thread, draft.seq, final.thread, final.seq) == (0, 0, 0, 1)
    assert len(reviews) == 2
    check_fork(reviews)


class Answers(dict[str, Any]):
    """What is answered to texts that begin so."""

    def get(self, text: str, default: Any = None) -> Any:
        """Return the answer to a text."""
        return next((answer for begin, answer in self.items() if text.startswith(begin)), default)
