"""The command `gracecl`: a module per verb, `main` calls them."""

from gracecl.cli.main import call, exit_code, main

__all__ = ["call", "exit_code", "main"]
