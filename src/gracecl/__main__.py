"""`python -m gracecl` is the command `gracecl`."""

from gracecl.cli import main

main()
