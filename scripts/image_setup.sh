#!/bin/sh
# What `bentoml containerize` runs in the image, as root, after the requirements are installed.
set -eu

# BentoML makes these folders when it starts, and cannot where the file system is read-only.
for folder in bentos models envs tmp; do
    mkdir -p "$BENTOML_HOME/$folder"
done
# Any user may run the container, not only the one that owns the files.
chmod 755 "$BENTOML_HOME"

# BentoML installs these to build requirements; ours are all built.
apt-get purge -q -y --auto-remove \
    -o APT::AutoRemove::RecommendsImportant=false -o APT::AutoRemove::SuggestsImportant=false \
    build-essential git gnupg2
rm -rf /var/lib/apt/lists/*
