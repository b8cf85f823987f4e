"""`gracecl study`: runs that belong together and the page they make. A study is a TOML file in this folder or one of the user's
(`study.py`); what its page shows beyond the table are renderers, chosen by name (`renderers.py`)."""
