"""The GPU's nanosecond clock on the host's scale. Standard library only. Must not know: what the times mean."""

from __future__ import annotations

_WINDOW_NS = 10_000_000_000  # clocks drift apart by some microseconds in this time


class DeviceClock:
    """Learns how far the two clocks are apart from events that the host sees soon after the device has timed them.

    What is seen last, least late, is right to within that delay: the smallest difference of the last ten to twenty
    seconds counts. Times it gives are never in the host's future.
    """

    def __init__(self) -> None:
        self._least: list[int | None] = [None, None]  # host minus device, of the last full window and of this one
        self._window_began_ns = 0

    def observe(self, device_ns: int, host_ns: int) -> None:
        """Learn that at `host_ns` the device's time `device_ns` had passed."""
        if host_ns - self._window_began_ns > _WINDOW_NS:
            self._least = [self._least[1], None]
            self._window_began_ns = host_ns
        difference = host_ns - device_ns
        current = self._least[1]
        self._least[1] = difference if current is None else min(current, difference)

    def on_host(self, device_ns: int) -> int:
        """Return a device time on the host's scale. Something must have been observed."""
        return device_ns + min(least for least in self._least if least is not None)
