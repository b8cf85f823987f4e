"""`python -m gracecl` is the command `gracecl`."""

from gracecl.lab.cli import main

main()
