"""Tag every LLM call of an agent with its program and thread; the server does the rest."""

from __future__ import annotations
