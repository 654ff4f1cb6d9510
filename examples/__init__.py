"""Agents that run against any OpenAI-compatible server, and the demo that runs them together."""
