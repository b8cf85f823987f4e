from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No test but those on real data may see the user's data or cache."""
    if request.node.get_closest_marker("real") is None:
        monkeypatch.delenv("GRACECL_DATA", raising=False)
    monkeypatch.delenv("GRACECL_MMAP_BYTES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
