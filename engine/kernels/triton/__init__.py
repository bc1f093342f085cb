"""The Triton kernels, whose files are in the folder `triton_kernels` of the source tree.

That folder is not installed under its own name, because another project publishes a package of that name.
"""

from pathlib import Path

# `setup.py` installs that folder in the place of this one, so this line runs in a source tree alone
__path__ = [str(Path(__file__).resolve().parents[3] / "triton_kernels")]
