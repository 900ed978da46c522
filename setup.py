"""Metadata, extras and the package map: `pasa.ops` is `ops/`, and so for `eval/` and `ascend_c/`."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "pasa" / "__init__.py").read_text(encoding="utf-8"))[1]

ROOTS = {"pasa": "pasa", "pasa.ops": "ops", "pasa.eval": "eval", "pasa.ascend_c": "ascend_c"}
PACKAGES = [
    name
    for root, folder in ROOTS.items()
    for name in [root, *(f"{root}.{sub}" for sub in find_packages(str(HERE / folder)))]
]

TRITON = ["triton>=3.6"]  # the first of ops/devices.py
NPU = ["torch-npu"]
TRANSFORMERS = ["transformers>=4.54.1", "safetensors"]  # pasa/patching/versions.py says the same
DIFFUSERS = ["diffusers>=0.37", *TRANSFORMERS]
EVAL = ["matplotlib>=3.8", "jinja2>=3", "gguf>=0.17", "accelerate>=1.0", *TRANSFORMERS]
EVAL = [*EVAL, "transformers>=5.0"]  # the models that it builds are written in configurations of this version
VIDEO = ["scikit-image>=0.22", "imageio>=2.34", "imageio-ffmpeg>=0.5", *DIFFUSERS, *EVAL]
LONGBENCH = ["rouge==1.0.1", "jieba>=0.42", "pyyaml", *EVAL]  # rouge: LongBench's scores are those of this version
DEV = [
    "pytest>=8",
    "pytest-xdist>=3.2",
    "pytest-cov>=7",
    "setuptools>=77",  # the test of the source distribution builds without a network
    "hypothesis>=6.100",
    "ruff==0.17.5",
    "mypy==2.4.1",
    "triton==3.6.0",
    "selenium>=4.20",  # opens the page of `pasa diagnose` in a browser
    "cmake>=3.18",  # the test of scripts/build_ascend.sh
    "mkdocs-material==9.8.1",  # the site in docs/; a build finds links that lead nowhere
    "mkdocstrings-python==2.0.11",  # its reference, made from docstrings
    "peft>=0.17",  # pasa.to_fp16 refuses its adapters
    "numpy<2.4",  # Triton 3.6's interpreter
    *VIDEO,
    *LONGBENCH,
]


class BuildWithScript(build_py):
    """Sources of the Ascend C kernels come with the script that builds them, which looks for them beside its folder."""

    SCRIPT = "scripts/build_ascend.sh"

    def run(self):
        super().run()
        if not self.editable_mode:
            self.mkpath(str(Path(self.build_lib, "pasa", "scripts")))
            self.copy_file(str(HERE / self.SCRIPT), str(Path(self.build_lib, "pasa", self.SCRIPT)))

    def get_outputs(self, include_bytecode=True):
        own = [] if self.editable_mode else [str(Path(self.build_lib, "pasa", self.SCRIPT))]
        return [*super().get_outputs(include_bytecode), *own]


setup(
    name="pasa",
    version=VERSION,
    description="FP16 attention that cannot overflow, for NVIDIA GPUs, Ascend NPUs, CPUs and other devices",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    keywords=["attention", "FP16", "overflow", "Ascend", "NPU", "numerical stability", "Triton"],
    project_urls={"Paper": "https://arxiv.org/abs/2503.01873"},
    cmdclass={"build_py": BuildWithScript},
    packages=PACKAGES,
    py_modules=["pasa_cli"],
    package_dir=ROOTS | {"": "scripts"},
    package_data={
        "pasa": ["py.typed"],
        "pasa.ops": ["**/README.md", "measured.json"],
        "pasa.eval": ["**/README.md", "**/*.html", "models/zoo/fields.json", "npu/*.json", "npu/results/*.json"],
        # Sources: an NPU machine builds them. What is built there belongs to that machine.
        "pasa.ascend_c": ["CMakeLists.txt", "*.md", "*/README.md", "*/*.h", "*/*.cpp", "*/*.asc", "kernel/310p/*"],
    },
    install_requires=["torch>=2.6", "numpy>=1.24", "typer>=0.15"],  # typer (it brings rich): the command line alone
    extras_require={
        "triton": TRITON,
        "npu": NPU,
        "transformers": TRANSFORMERS,
        "diffusers": DIFFUSERS,
        "eval": EVAL,
        "video": VIDEO,
        "longbench": LONGBENCH,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": ["pasa = pasa_cli:main"],
        # vLLM and SGLang load these in each of their processes
        "vllm.general_plugins": ["pasa = pasa.patching.vllm:plugin"],
        "sglang.srt.plugins": ["pasa = pasa.patching.sglang:plugin"],
    },
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
