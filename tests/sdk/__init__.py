"""Tests of the SDK."""

from __future__ import annotations
