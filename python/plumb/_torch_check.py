"""Whether this environment's torch is the one that plumb's library was built with. Imports nothing of either."""

import os
import runpy

_HERE = os.path.dirname(os.path.abspath(__file__))


def built() -> dict:
    """VERSION and TORCH of the build (written by CMake)."""
    path = os.path.join(_HERE, "_built.py")
    if not os.path.exists(path):
        raise ImportError(
            f"plumb's library is not built in {_HERE}: run `make` in a clone, or `pip install --no-build-isolation .`"
        )
    return runpy.run_path(path)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def refusal(found: str, where: str) -> str | None:
    """Returns the error for torch `found` in the folder `where`, None if it fits. torch keeps no binary interface
    between its minor versions."""
    facts = built()
    wanted = _minor(facts["TORCH"])
    if _minor(found) == wanted:
        return None
    return (
        f"plumb {facts['VERSION']} was built with torch {facts['TORCH']} and cannot run with torch {found} ({where}). "
        f"Install torch {wanted} (`pip install 'torch=={wanted}.*'`), a wheel of plumb for torch {_minor(found)}, or build "
        "plumb for this torch from its sources: `pip install --no-build-isolation .`"
    )
