"""`python -m server.text.convert_tokenizer DIRECTORY`: writes a tokenizer.json made from older files to stdout.

A process of its own, so that transformers (slow to import, large) never enters the API process. Never runs code from
the directory.
"""

from __future__ import annotations

import sys
from typing import Any, cast


def main() -> None:
    """Convert; a traceback whose last line says why, and exit code 1, where transformers cannot."""
    import transformers

    tokenizer = cast("Any", transformers).AutoTokenizer.from_pretrained(
        sys.argv[1], use_fast=True, trust_remote_code=False, local_files_only=True
    )
    sys.stdout.write(tokenizer.backend_tokenizer.to_str())


if __name__ == "__main__":
    main()
