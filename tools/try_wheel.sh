#!/usr/bin/env bash
# Tries a wheel or an sdist as a newcomer would: bash tools/try_wheel.sh FILE [PYTHON ...]
#
# For each interpreter it makes an empty virtual environment in a folder outside the checkout, and there runs the two
# commands that the documentation gives: `pip install FILE[train]` and `rankfold quickstart`. It ends with an error
# where one of them fails or the quickstart has not proven the adapter, and prints one row for each: seconds, and bytes.
# As root it does so as an ordinary user, for whom it makes an account and removes it.
#
#   EXTRA     the extra to install; train without it
#   STEPS     steps of the small model's pretraining, for a shorter trial; the quickstart's own number without it
#   KEEP      if set, the folder stays, and so do the logs in it
#
# pip's settings (PIP_*) and the certificates and proxies of the environment are handed on, nothing else of it.
set -euo pipefail

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
[ $# -ge 1 ] || fail "give the wheel or sdist to install: bash tools/try_wheel.sh FILE [PYTHON ...]"
[ -f "$1" ] || fail "$1 is not a file: give what tools/build_wheel.sh has made."
file=$(readlink -f "$1")
shift
[ $# -gt 0 ] || set -- "$(command -v python3)"
extra=${EXTRA:-train}
account=rankfold-trial-$$

folder=$(mktemp -d /tmp/rankfold-trial.XXXXXX)
cleanup() {
    if [ "$(id -u)" -eq 0 ]; then userdel "$account" 2>/dev/null || true; fi
    if [ -n "${KEEP:-}" ]; then printf 'kept %s\n' "$folder" >&2; else rm -rf "$folder"; fi
}
trap cleanup EXIT
cp "$file" "$folder/"
as_user=()
if [ "$(id -u)" -eq 0 ]; then
    useradd --no-create-home --home-dir "$folder" --shell /bin/bash "$account"
    chown -R "$account" "$folder"
    as_user=(setpriv --reuid="$account" --regid="$account" --clear-groups)
fi

handed_on=()
while IFS= read -r name; do handed_on+=("$name=${!name}"); done < <(
    compgen -e | grep -E '^PIP_|^(SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE)$|^(https?|no|all)_proxy$|^(HTTPS?|NO|ALL)_PROXY$'
)
# Runs a command in the folder as the newcomer, with hardly anything in the environment.
newcomer() {
    (cd "$home" && "${as_user[@]}" env -i HOME="$home" PATH="$home/venv/bin:/usr/bin:/bin" LANG=C.UTF-8 \
        ${handed_on[@]+"${handed_on[@]}"} ${libpython:+LD_LIBRARY_PATH="$libpython"} "$@")
}

# The megabytes that pip says it downloads, from lines such as "Downloading einops-0.8.1.whl (64 kB)".
downloaded() {
    awk '/^ *Downloading .*\(.* [kMG]?B\)/ {
        size = $(NF - 1); sub(/^\(/, "", size); unit = $NF
        total += size * (unit ~ /^G/ ? 1000 : unit ~ /^M/ ? 1 : unit ~ /^k/ ? 0.001 : 0.000001)
    } END { printf "%.0f", total }' "$1"
}
megabytes() { du -s --apparent-size --block-size=1000000 "$@" | awk '{ total += $1 } END { print total }'; }

row='| %s | %s | %s | %s | %s | %s |\n'
rows=()
for python in "$@"; do
    version=$("$python" -c 'import platform; print(platform.python_version())') || fail "$python is no Python."
    home=$folder/$version
    libpython=
    mkdir "$home"
    if [ ${#as_user[@]} -gt 0 ]; then
        chown "$account" "$home"
        if ! "${as_user[@]}" env "$python" -c "" 2>/dev/null; then # it lies in a folder of root's
            cp -a "$("$python" -c 'import sys; print(sys.base_prefix)')" "$folder/python-$version"
            python=$folder/python-$version/bin/python3
            libpython=$folder/python-$version/lib # a shared one knows only the place that it was built for
        fi
    fi
    newcomer "$python" -m venv venv
    printf '[%s] pip install %s[%s]\n' "$version" "$(basename "$file")" "$extra" >&2
    started=$SECONDS
    newcomer pip install "$folder/$(basename "$file")[$extra]" >"$home/pip.log" 2>&1 ||
        { tail -20 "$home/pip.log" >&2; fail "pip install failed under Python $version."; }
    installing=$((SECONDS - started))
    site=$(newcomer python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    newcomer pip check >&2
    printf '[%s] rankfold quickstart\n' "$version" >&2
    started=$SECONDS
    newcomer rankfold quickstart ${STEPS:+--pretrain-steps "$STEPS"} >"$home/quickstart.log" 2>&1 ||
        { tail -20 "$home/quickstart.log" >&2; fail "the quickstart failed under Python $version."; }
    running=$((SECONDS - started))
    sed -n "/^== what came out/,/^$/p" "$home/quickstart.log" >&2
    [ -s "$home/rankfold-quickstart/adapter/adapter_model.safetensors" ] || fail "no adapter under Python $version."
    libraries=$(find "$site/engine/kernels/native" -name '*.so' | wc -l)
    # shellcheck disable=SC2059  # the row's own format
    rows+=("$(printf "$row" "$version" "$(newcomer python -c 'import torch; print(torch.__version__)')" \
        "$libraries" "$(downloaded "$home/pip.log")" "$(megabytes "$site")" "$installing + $running")")
    if [ -z "${KEEP:-}" ]; then rm -rf "$home" "$folder/python-$version"; fi
done
printf '%s: %s bytes\n\n' "$(basename "$file")" "$(stat -c %s "$file")"
# shellcheck disable=SC2059
printf "$row" Python torch "kernel libraries" "downloaded, MB" "site-packages, MB" "seconds: pip + quickstart"
printf '|---|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
