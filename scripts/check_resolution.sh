#!/usr/bin/env bash
# Checks that the dependencies of all extras and groups resolve together, without local wheels and
# configuration. It downloads only metadata, except seqeval, which has no wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
unset "${!UV_@}"

resolve() {
    .venv/bin/uv pip compile --quiet --no-config --output-file /dev/null \
        --only-binary :all: --no-binary seqeval \
        --python-platform x86_64-manylinux_2_28 --python-version "$@"
}

if ! echo pip | resolve 3.11 -; then
    echo "error: The package index cannot be reached." >&2
    exit 1
fi
trap 'echo "error: pip cannot install these requirements. Fix pyproject.toml or constraints.txt." >&2' ERR
for python in 3.11 3.13; do
    resolve $python pyproject.toml --all-extras
    resolve $python pyproject.toml --all-extras --group dev --group bench --group site -c constraints.txt
done
