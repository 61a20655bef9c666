"""Runs the comparisons named with Triton's interpreter: `python -m tests.unit.backends.graphs.interpret NAME...`.

A process of its own, since Triton must be told before it is imported. Prints one JSON object: name -> what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.unit.backends.graphs.comparisons import comparisons


def main() -> None:
    torch.set_num_threads(1)
    failed = {}
    named = comparisons("cpu", torch.float32)
    for name in sys.argv[1:]:
        try:
            named[name]()
            failed[name] = ""
        except Exception:  # noqa: BLE001 (whatever it is, it is the result)
            failed[name] = traceback.format_exc(limit=-4)
    sys.stdout.write(json.dumps(failed))


if __name__ == "__main__":
    main()
