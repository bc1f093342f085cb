"""Installs the packages `engine` and `triton_kernels`; needs no compiler and no GPU."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

setup(
    name="lora-engine",
    version="0.1.0",
    description="A throughput-focused training engine for LoRA and full fine-tuning of large language models",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["engine", "engine.*", "triton_kernels", "triton_kernels.*"]),
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11,<2.14",
        "transformers>=5.17",
        "safetensors",
        "sentencepiece",
        "jinja2",
        "numpy",
        "jsonargparse>=4.50",
        "docstring-parser",
        "PyYAML",
    ],
    extras_require={
        "peft": ["peft"],
        "tensorboard": ["tensorboard"],
        # CUDA builds of torch bring their own; this is for running kernels through the interpreter on a CPU.
        "triton": ["triton>=3.6; platform_system == 'Linux'"],
        "test": [
            "hypothesis",
            "mypy",
            "peft",
            "pytest",
            "pytest-timeout",
            "ruff",
            "tensorboard",
            "types-PyYAML",
        ],
    },
)
