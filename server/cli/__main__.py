"""`python -m server.cli`: the `megakernel` command without its script on PATH."""

from server.cli import main

main()
