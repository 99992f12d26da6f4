#!/bin/sh
# `bentoml containerize` runs this in the image, as root, after installing the requirements.
set -eu

# BentoML creates these folders when it starts, which fails on a read-only file system.
for folder in bentos models envs tmp; do
    mkdir -p "$BENTOML_HOME/$folder"
done
# Any user can run the container, not only the owner of the files.
chmod 755 "$BENTOML_HOME"

# BentoML installs compilers for requirements without wheels. All of ours have wheels.
apt-get purge -q -y --auto-remove \
    -o APT::AutoRemove::RecommendsImportant=false -o APT::AutoRemove::SuggestsImportant=false \
    build-essential git gnupg2
rm -rf /var/lib/apt/lists/*
