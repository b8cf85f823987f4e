"""`gracecl study`: runs that belong together and the page they make. A study is a TOML file in this folder or one of the user's
(`study.py`); registered renderers make the sections of its page below the table (`results.py`)."""
