"""The prompt templates of LongBench v1, from the distribution ``lm-eval``, which carries them as data.

A score can be compared with published ones only if every character of the prompt is the same. lm-eval's copies differ
from the benchmark's own (THUDM/LongBench at 2e00731, LongBench/config/dataset2prompt.json) in the names of the fields
and, for six of them, in white space. Every template is checked against the digest of the original.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from typing import Any

SOURCE = ("lm-eval", "0.4.13")
FOLDER = "lm_eval/tasks/longbench"
FIELDS = {"{{context}}": "{context}", "{{question}}": "{input}"}
WHITE_SPACE = {  # data set: the end of lm-eval's template, and of the benchmark's
    "triviaqa": ("\n{input}", "\n\n{input}"),
    "samsum": ("\n{input}", "\n\n{input}"),
    "passage_count": ("", " "),
    "passage_retrieval_en": ("", " "),
    "lcc": ("", "\n"),
    "repobench-p": ("", "\n"),
}
DIGESTS = {
    "narrativeqa": "aada7ed24b06abace5b0045ac3bcfe06fc831a6cf434f0ecfd99fb7b3d299e1c",
    "qasper": "0fbdd123fe7f83d6d6a9c583ca28cb29d68e523bf8fec01a0cf2dcd11037775d",
    "multifieldqa_en": "20b4666a2de8a1f701bdb6c4e015fa9f8758d64b361d841f7766df6c9ceba770",
    "multifieldqa_zh": "344b3a4e557cd5470c661b3d6b374339717e1257a6c01f628d22322d4a554b94",
    "hotpotqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "2wikimqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "musique": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "dureader": "ae53329f51b17908e08b8c6bf366987282b8b38c0ee35275ebd7b79e9b30eff2",
    "gov_report": "91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95",
    "qmsum": "dca23b678fe0183bbd9555b57947022aed1b85739da5ad7e1b4708dd0c71c409",
    "multi_news": "2af3f28c40b902e6535d4910510d51653613c49de9b2fc287c5958395061101d",
    "vcsum": "3e5d8241bc9b512eb4929c1ba80882a44f50b446bc2b1d9d79eff030dd10dc27",
    "trec": "0eff8bebdba99d91e9d7d91b6ab39455ac74648bea92c9255c9f68c62175b2db",
    "triviaqa": "00a802e6377e72fca39b169cf6c28893bedf23ba7286b03ecd15867c3e27a7c4",
    "samsum": "a68d884234907eefcaa0eacf7b2997f60fa46603988dceae6a44f9b49f045b3f",
    "lsht": "f3edabdf7fae53d6cadfa7a10f3574d114302161c46dacecd5d30763204bbbf3",
    "passage_count": "986550b6c61009c629a4535766d94b7b51e2b2b9e1ed169e4ecb54417466e964",
    "passage_retrieval_en": "39b96b7fa52bdd2aa2bde34ea199158505201b9a0a2c3ce94e80249293f60431",
    "passage_retrieval_zh": "c1e2346e245eb365bc33a1503cde2e473948a2aad51c3e4c72893e61ab074d60",
    "lcc": "6a1f24cf0bb83cd90f1fca8f0dd24801626c2aaea29db834ddc83b950e71190e",
    "repobench-p": "ee9ec182ea5ffeb70a7140d55baea97264a8612d88226d323afa90859c36240c",
}
"""SHA-256 of the original templates."""


@cache
def template(dataset: str) -> str:
    """Return the template of a data set; ``{context}`` and, in most, ``{input}`` are to be filled in.

    Raises
    ------
    FileNotFoundError
        lm-eval is not installed, or in a version without the file; the message is the command that installs it.
    ValueError
        The text is not the benchmark's.
    """
    advice = f"run: pip install --no-deps {SOURCE[0]}=={SOURCE[1]}"
    try:
        text = _read(dataset)
    except (metadata.PackageNotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(f"LongBench's prompts are not installed; {advice}") from error
    for field, original in FIELDS.items():
        text = text.replace(field, original)
    ending, original = WHITE_SPACE.get(dataset, ("", ""))
    text = text.removesuffix(ending) + original
    if hashlib.sha256(text.encode()).hexdigest() != DIGESTS[dataset]:
        raise ValueError(f"the template of {dataset} in {SOURCE[0]} is not LongBench's; {advice}")
    return text


def _read(dataset: str) -> str:
    """Return the prompt in lm-eval's configuration of the data set."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda *_: None)  # tags that name functions
    path = metadata.distribution(SOURCE[0]).locate_file(f"{FOLDER}/{dataset}.yaml")
    with open(str(path), encoding="utf-8") as file:
        text: str = yaml.load(file, loader)["doc_to_text"]
    return text
