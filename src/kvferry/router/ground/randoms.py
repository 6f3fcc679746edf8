"""Random names, cut from a supply: asking the system for each costs more than it takes to use them."""

from __future__ import annotations

import secrets

_SUPPLY_BYTES = 4096


class Randoms:
    """Hexadecimal digits from the system's generator, each given out once."""

    def __init__(self) -> None:
        self._supply = ""
        self._used = 0

    def digits(self, count: int) -> str:
        """So many digits; 32 of them are 128 random bits."""
        if self._used + count > len(self._supply):
            self._supply = secrets.token_hex(max(_SUPPLY_BYTES, count))
            self._used = 0
        begin, self._used = self._used, self._used + count
        return self._supply[begin : self._used]


randoms = Randoms()
"""Of the event loop's thread."""
