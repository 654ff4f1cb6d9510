"""What a program is made with, for people who look at it: read off the modules that it has loaded.

Nothing is imported, and nothing depends on it: a process that loads several is named after the
first of this list.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import Final

#: (a module that only this framework has, its name), the more particular ones first.
_KNOWN: Final = (
    ("langgraph.graph", "LangGraph"),
    ("autogen_agentchat", "AutoGen"),
    ("autogen_core", "AutoGen"),
    ("agent_framework", "Agent Framework"),
    ("autogen", "AG2"),
    ("agents.run_context", "OpenAI Agents"),
    ("pydantic_ai", "Pydantic AI"),
    ("dspy", "DSPy"),
    ("crewai", "CrewAI"),
    ("llama_index.core", "LlamaIndex"),
    ("smolagents", "smolagents"),
    ("langchain_core", "LangChain"),
    ("litellm", "LiteLLM"),
    ("openai", "OpenAI"),
    ("anthropic", "Anthropic"),
)


def framework_here(modules: Container[str] | None = None) -> str | None:
    """Return the name of the framework that this process has loaded, None: none that is known.

    >>> framework_here({"openai", "langgraph.graph"}), framework_here({"json"})
    ('LangGraph', None)
    """
    loaded = sys.modules if modules is None else modules
    return next((name for module, name in _KNOWN if module in loaded), None)
