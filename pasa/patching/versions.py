"""Check that the installed transformers is new enough for a patch."""

from __future__ import annotations

import re

OLDEST = (4, 54, 1)
"""First version of transformers in which models can be patched.

In 4.54.0 GPT-2 makes its own masks. Older versions have no `set_attn_implementation`, and those before 4.53 have no
registry of masks. `scripts/test_transformers.sh` runs the tests with this version and with the newest one.
"""


def check_transformers(user: str = "patch_pipeline", oldest: tuple[int, ...] = OLDEST) -> None:
    """Raise an ImportError if the installed transformers is older than `oldest`.

    Parameters
    ----------
    user : str, default "patch_pipeline"
        The function that needs the version; the message begins with its name.
    oldest : tuple of int
        First version that is sufficient.

    Raises
    ------
    ImportError
        The installed version is older. The message names it, and the version to install.
    """
    import transformers

    numbers = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:3]))
    if numbers < oldest:
        needed = ".".join(map(str, oldest))
        raise ImportError(
            f"{user} needs transformers {needed} or newer, and {transformers.__version__} is installed: "
            f"pip install 'transformers>={needed}'"
        )
