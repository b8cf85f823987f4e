"""The command `gracecl`: a module per verb, `main` calls them."""

from gracecl.lab.cli.main import VERBS, call, exit_code, main

__all__ = ["VERBS", "call", "exit_code", "main"]
