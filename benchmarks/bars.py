"""What a figure is held against."""

from typing import Any

Figures = dict[str, Any]


def at_most(name: str, value: float, limit: float) -> Figures:
    """A bar that holds from the limit down."""
    return _bar(name, value, f"<= {limit:g}", holds=value <= limit)


def at_least(name: str, value: float, limit: float) -> Figures:
    """A bar that holds from the limit up."""
    return _bar(name, value, f">= {limit:g}", holds=value >= limit)


def _bar(name: str, value: float, bar: str, *, holds: bool) -> Figures:
    return {"name": name, "value": float(f"{value:.4g}"), "bar": bar, "holds": holds}
