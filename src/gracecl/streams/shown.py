"""A figure that notebooks show as the value of a cell, without pyplot; apart, as matplotlib is imported where it is needed."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class ShownFigure(Figure):
    def _repr_png_(self) -> bytes:
        """Return the picture in the form that notebooks ask for."""
        written = BytesIO()
        self.savefig(written, format="png")
        return written.getvalue()
