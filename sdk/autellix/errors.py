"""What the SDK may raise or warn about.

AutellixError
├── ConfigError (also a ValueError)   ``init`` was given something that cannot be meant
└── CarrierError (also a ValueError)  ``attach`` was given a malformed carrier

Nothing of this is ever raised on the path of a call: there the SDK counts, warns once and steps
aside.
"""

from __future__ import annotations


class AutellixError(Exception):
    """The SDK was misused in ``init`` or ``attach``."""


class ConfigError(AutellixError, ValueError):
    """A setting names the field, the value and what is allowed."""


class CarrierError(AutellixError, ValueError):
    """A carrier holds a session or thread that cannot be read."""


class AutellixWarning(UserWarning):
    """Something is not as the user probably wants it; one warning per cause."""
