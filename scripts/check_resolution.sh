#!/usr/bin/env bash
# Resolves all that the Makefile and the documents install into one environment, without the local
# wheels and the configuration of this machine. Only metadata is downloaded; seqeval alone, which has
# no wheel, is built. What resolves together, such as the extras `train` and `gpu`, also resolves
# alone.
set -euo pipefail
cd "$(dirname "$0")/.."
unset "${!UV_@}"

resolve() {
    .venv/bin/uv pip compile --quiet --no-config --output-file /dev/null \
        --only-binary :all: --no-binary seqeval \
        --python-platform x86_64-manylinux_2_28 --python-version "$@"
}

if ! echo pip | resolve 3.11 -; then
    echo "error: the package index cannot be reached, and this check needs it" >&2
    exit 1
fi
trap 'echo "error: pip could not install these requirements: mend pyproject.toml or constraints.txt" >&2' ERR
for python in 3.11 3.13; do
    resolve $python pyproject.toml --all-extras
    resolve $python pyproject.toml --all-extras --group dev --group bench --group site -c constraints.txt
done
