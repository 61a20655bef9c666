"""The slots' state on a device that moves slots on by itself: its layout, and what the host writes into it."""
