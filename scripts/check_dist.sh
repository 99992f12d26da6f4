#!/usr/bin/env bash
# Builds wheel and sdist in dist/ and installs each in an empty environment and folder. The wheel
# trains one step, scores a file, and serves the tasks of the default model to a client.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
uv="$root/.venv/bin/uv"
rm -rf "$root/dist"
cd "$root"
.venv/bin/python -m hatchling build
"$uv" tool run twine check --strict dist/*

work=$(mktemp -d)
server=
trap 'test -z "$server" || kill "$server"; rm -rf "$work"' EXIT
cd "$work"
export ALBERT_SERVE_CACHE="$work/cache" BENTOML_HOME="$work/bentoml"
"$uv" venv --quiet --python "$root/.venv/bin/python" sdist
"$uv" pip install --quiet --python sdist/bin/python "$root"/dist/*.tar.gz
sdist/bin/python -c 'from albert_serve.client import AlbertClient'

python3 -m venv wheel
wheel/bin/pip install --quiet --constraint "$root/constraints.txt" torch
wheel/bin/pip install --quiet "$(echo "$root"/dist/*.whl)[train]"
printf 'text,label\nA warm film.,good\nA dull film.,bad\n' >texts.csv
wheel/bin/albert-serve finetune --text-classification texts.csv --validation texts.csv \
    --steps 1 --output run
test -f run/checkpoint/config.json
wheel/bin/albert-serve score --task text-classification texts.csv scored.csv
test "$(wc -l <scored.csv)" -eq 3
wheel/bin/albert-serve serve --port 3979 >serve.log 2>&1 &
server=$!
wheel/bin/python - <<'PYTHON'
from albert_serve.client import AlbertClient

with AlbertClient("http://127.0.0.1:3979") as albert:
    albert.wait_until_ready(timeout_s=120)
    assert albert.text_classification("A warm and funny film.")[0].label == "positive"
    assert albert.fill_mask("She [MASK] born in London in 1950.")[0].token_str == "was"
    context = (
        "Apollo 11 landed on the Moon on 20 July 1969. Neil Armstrong and Buzz Aldrin walked on its "
        "surface for about two hours, while Michael Collins stayed in orbit."
    )
    answer = albert.question_answering({"question": "Who stayed in orbit?", "context": context})
    assert answer.answer == "Michael Collins"
    pair = {"text": "The sun rose.", "text_pair": "Then the birds began to sing."}
    order = albert.sentence_order(pair)
    vectors = albert.feature_extraction(["It rained.", "The weather was bad."], normalize=True)
    print(order, len(vectors), "embeddings")
PYTHON
echo "dist/ is ready: $(ls "$root/dist" | xargs)"
