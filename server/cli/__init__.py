"""The command line: `megakernel serve | chat | pull | models | check | bench | version`.

Importing this package must stay cheap: commands import what they need when they run. Must not know: HTTP, tensors.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command in sys.argv. Our own errors are shown as a line, not a traceback; settings exit 2, others 1."""
    from server.cli.app import app
    from server.cli.console import err
    from server.errors import ConfigError, MegakernelError

    try:
        app()
    except MegakernelError as error:
        err.print("[bold red]error:[/bold red]", end=" ")
        err.print(str(error), markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
