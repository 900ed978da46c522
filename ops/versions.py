"""Return versions of installed packages."""

from __future__ import annotations

from importlib import metadata


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
