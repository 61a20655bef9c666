"""Runs all comparisons with Triton's interpreter: `python -m tests.unit.backends.graphs.interpret`.

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
    for name, comparison in comparisons("cpu", torch.float32).items():
        try:
            comparison()
            failed[name] = ""
        except Exception:  # noqa: BLE001 (whatever it is, it is the result)
            failed[name] = traceback.format_exc(limit=-4)
    sys.stdout.write(json.dumps(failed))


if __name__ == "__main__":
    main()
