"""Where the device's time went: computing, waiting for the host, parked. Standard library only.

Times of steps come from the device; all before the end of the last one, or of the last rest, is accounted for.
Must not know: what steps do.
"""

from __future__ import annotations


class Ledger:
    """Three sums that grow together with the clock, up to the step that is running."""

    def __init__(self, now_ns: int) -> None:
        """Begin at `now_ns`, at rest."""
        self._upto_ns = now_ns
        self._at_rest = True
        self.compute_ns = 0
        self.wait_host_ns = 0
        self.parked_ns = 0

    def work(self, now_ns: int) -> None:
        """There is work from now on."""
        self.settle(now_ns)
        self._at_rest = False

    def step(self, started_ns: int, ended_ns: int) -> None:
        """A step has run. Between steps the device waited for the host."""
        started_ns = max(started_ns, self._upto_ns)
        ended_ns = max(ended_ns, started_ns)
        self.wait_host_ns += started_ns - self._upto_ns
        self.compute_ns += ended_ns - started_ns
        self._upto_ns = ended_ns

    def rest(self) -> None:
        """All work is done; what follows is rest."""
        self._at_rest = True

    def settle(self, now_ns: int) -> None:
        """Account for rest until now."""
        if self._at_rest and now_ns > self._upto_ns:
            self.parked_ns += now_ns - self._upto_ns
            self._upto_ns = now_ns
