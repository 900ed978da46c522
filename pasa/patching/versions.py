"""Which versions of transformers a model can be patched in."""

from __future__ import annotations

import re

OLDEST = (4, 54, 1)
"""First version in which models can be patched: GPT-2 of 4.54.0 makes its own masks, older versions have no
`set_attn_implementation`, and those before 4.53 no registry of masks. `scripts/test_transformers.sh` runs the tests
with this version and with the newest."""


def check_transformers() -> None:
    """Refuse a version of transformers that models cannot be patched in.

    Raises
    ------
    ImportError
        The installed version is older; the message names it, and what to install.
    """
    import transformers

    numbers = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:3]))
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"patch_pipeline needs transformers {oldest} or newer, and {transformers.__version__} is installed: "
            f"pip install 'transformers>={oldest}'"
        )
