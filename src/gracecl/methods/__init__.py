"""One file per method; a file is imported when its name is asked for (see gracecl.registry)."""
