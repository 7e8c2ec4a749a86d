"""What to say where one of the two AG2s is not installed: both are called ``ag2``, and only one can be."""

from __future__ import annotations

from importlib.util import find_spec

_EXTRAS = {"ag2": "ag2", "autogen": "ag2-classic"}
_NAMES = {"ag2": "AG2 1.x (`import ag2`)", "autogen": "AG2 classic (`import autogen`)"}


def missing(module: str) -> ImportError:
    """The error for ``module`` (``"ag2"`` or ``"autogen"``) not being there: it names the extra to install."""
    other = "autogen" if module == "ag2" else "ag2"
    text = f"{_NAMES[module]} is not installed: pip install 'smoothctx[{_EXTRAS[module]}]'"
    found = find_spec(other)
    if found is not None and found.origin is not None:  # a mere folder of that name has none
        ours = f"smoothctx_autogen.{_EXTRAS[other].replace('-', '_')}"
        text += f". Installed is {_NAMES[other]}, for which there is {ours}"
        text += "; both are the package `ag2`, so an environment can have one of them"
    return ImportError(text)
