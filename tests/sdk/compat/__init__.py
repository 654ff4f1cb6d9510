"""The SDK against other versions and frameworks, each in an environment of its own.

``make compat`` makes the environments, runs the tests and writes ``docs/compatibility.md``. Where a
framework is not installed, as in ``make test``, its tests are skipped.
"""

from __future__ import annotations
