"""The environments of ``make compat``: a Python, some packages, and the tests to run there."""

from __future__ import annotations

from typing import Final, NamedTuple

CORE: Final = ("tests/sdk/test_session.py", "tests/sdk/test_context.py")
ALL_PURE: Final = (
    *CORE,
    "tests/sdk/test_reports.py",
    "tests/sdk/test_lifecycle.py",
    "tests/sdk/test_wire.py",
    "tests/sdk/test_surface.py",
)


class Environment(NamedTuple):
    """One throw-away environment."""

    name: str
    python: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    shows: tuple[str, ...]  # the packages whose versions the table shows


def _own(name: str, python: str, *packages: str, test: str, shows: str) -> Environment:
    return Environment(name, python, packages, (f"tests/sdk/{test}",), (shows, "openai"))


def _graphs(name: str, python: str, *packages: str) -> Environment:
    """LangGraph and LangChain: unmodified, and with the adapters."""
    tests = (
        "tests/sdk/test_langgraph.py",
        "tests/integrations/test_langgraph.py",
        "tests/integrations/test_langgraph_runs.py",
        "tests/integrations/test_langchain.py",
    )
    return Environment(name, python, packages, tests, ("langgraph", "langchain-openai", "openai"))


def _teams(name: str, python: str, *packages: str) -> Environment:
    """AutoGen: unmodified, and with the adapter."""
    tests = (
        "tests/sdk/test_autogen.py",
        "tests/integrations/test_autogen.py",
        "tests/integrations/test_autogen_runs.py",
    )
    return Environment(name, python, packages, tests, ("autogen-agentchat", "openai"))


ENVIRONMENTS: Final = (
    Environment("openai-oldest", "3.10", ("openai==1.60.0",), CORE, ("openai", "httpx")),
    Environment("openai-1", "3.12", ("openai>=1.60,<2",), CORE, ("openai", "httpx")),
    Environment("openai-2", "3.12", ("openai>=2,<3",), CORE, ("openai", "httpx")),
    Environment("python-3.10", "3.10", ("openai>=3", "httpx"), ALL_PURE, ("openai", "httpx2")),
    Environment("python-3.11", "3.11", ("openai>=3", "httpx"), ALL_PURE, ("openai", "httpx2")),
    Environment("python-3.12", "3.12", ("openai>=3", "httpx"), ALL_PURE, ("openai", "httpx2")),
    Environment("python-3.13", "3.13", ("openai>=3", "httpx"), ALL_PURE, ("openai", "httpx2")),
    _graphs("langgraph-oldest", "3.11", "langgraph==1.0.0", "langgraph-prebuilt==1.0.0",
            "langchain==1.0.0", "langchain-core==1.0.0", "langchain-openai==1.0.0"),
    _graphs("langgraph-3.10", "3.10", "langgraph>=1", "langchain>=1", "langchain-openai>=1"),
    _graphs("langgraph-3.13", "3.13", "langgraph>=1", "langchain>=1", "langchain-openai>=1"),
    Environment(
        "langgraph-dev", "3.12",
        ("langgraph-cli[inmem]", "langgraph>=1", "langchain>=1", "langchain-openai>=1"),
        ("tests/sdk/test_langgraph_dev.py",),
        ("langgraph-cli", "langgraph-api", "langgraph", "langchain"),
    ),
    _teams("autogen-oldest", "3.11", "autogen-agentchat==0.7.1", "autogen-ext[openai]==0.7.1"),
    _teams("autogen", "3.12", "autogen-agentchat>=0.7", "autogen-ext[openai]>=0.7"),
    _own("ag2", "3.12", "ag2[openai]>=1.2", test="test_ag2.py", shows="ag2"),
    _own("ag2-classic", "3.12", "ag2[openai]>=0.11,<1", test="test_ag2_classic.py", shows="ag2"),
    _own("openai-agents", "3.12", "openai-agents>=0.24", test="test_openai_agents.py",
         shows="openai-agents"),
    _own("pydantic-ai", "3.12", "pydantic-ai-slim[openai]>=2", test="test_pydantic_ai.py",
         shows="pydantic-ai-slim"),
    _own("agent-framework", "3.12", "agent-framework-openai>=1", test="test_agent_framework.py",
         shows="agent-framework-openai"),
    _own("litellm", "3.12", "litellm==1.110.2", test="test_litellm.py", shows="litellm"),
    _own("notebook", "3.12", "ipython", "openai>=3", test="test_notebook.py", shows="ipython"),
    _own("gevent", "3.12", "gevent", "openai>=3", test="test_gevent.py", shows="gevent"),
    Environment(
        "types", "3.12", ("basedpyright", "mypy", "openai"),
        ("tests/sdk/test_types.py",), ("basedpyright", "mypy"),
    ),
    Environment(
        "web", "3.12", ("openai>=3", "starlette", "fastapi", "uvloop", "uvicorn"),
        ("tests/sdk/test_web.py",), ("starlette", "fastapi", "uvloop", "openai"),
    ),
)  # fmt: skip
