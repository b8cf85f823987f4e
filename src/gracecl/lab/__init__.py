"""The laboratory: runs in folders, studies, tuning, reports and the command line, made of the library and never imported by it."""
