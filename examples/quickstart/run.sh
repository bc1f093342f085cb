#!/usr/bin/env bash
# The whole main job on real text: bash examples/quickstart/run.sh   (--help for more; README.md says what happens)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for python in "$here/../../.venv/bin/python" ${PYTHON:-python3 python3.12 python3.11}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        exec "$python" "$here/quickstart.py" "$@"
    fi
done
echo "error: no Python 3.11 or newer was found: install Python 3.11 or 3.12, or set PYTHON to its path." >&2
exit 2
