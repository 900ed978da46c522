"""Which versions of transformers a model can be patched in."""

from __future__ import annotations

import re

OLDEST = (4, 54, 1)
"""First version in which models can be patched: GPT-2 of 4.54.0 makes its own masks, older versions have no
`set_attn_implementation`, and those before 4.53 no registry of masks. `scripts/test_transformers.sh` runs the tests
with this version and with the newest."""


def check_transformers(user: str = "patch_pipeline", oldest: tuple[int, ...] = OLDEST) -> None:
    """Refuse a version of transformers that models cannot be patched in, or that is too old for a user of it.

    Parameters
    ----------
    user : str, default "patch_pipeline"
        Who needs the version; the message begins with it.
    oldest : tuple of int
        First version that will do.

    Raises
    ------
    ImportError
        The installed version is older; the message names it, and what to install.
    """
    import transformers

    numbers = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:3]))
    if numbers < oldest:
        needed = ".".join(map(str, oldest))
        raise ImportError(
            f"{user} needs transformers {needed} or newer, and {transformers.__version__} is installed: "
            f"pip install 'transformers>={needed}'"
        )
