#!/usr/bin/env bash
# Runs the GPU tests and compares the speed of training and inference, in ten minutes on one GPU.
#
#   benchmarks/gpu_first_look.sh FOLDER               on a GPU; needs no package registry
#   DEVICE=cpu benchmarks/gpu_first_look.sh FOLDER    a rehearsal with small shapes
#
# Each part has a time limit. Its output is in FOLDER/PART.log while it runs, its tables in
# FOLDER/PART/. FOLDER/summary.txt gets a line as each part ends; status 124 is the time limit.
# PYTHON selects the interpreter (default: python3).
set -u
cd "$(dirname "$0")/.." || exit
folder=$(realpath -m "${1:?usage: benchmarks/gpu_first_look.sh FOLDER}")
device=${DEVICE:-cuda}
python=${PYTHON:-python3}
# A rehearsal has more time: it shows that each part ends, on a busy machine too.
patience=$([ "$device" = cuda ] && echo 1 || echo 5)
mkdir -p "$folder"
: >"$folder/summary.txt"

part() { # NAME SECONDS COMMAND...: run a command within a time limit
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    # SIGINT first: pytest then still reports the tests that ended.
    timeout --signal=INT --kill-after=10 $((limit * patience)) "$@" >"$folder/$name.log" 2>&1
    status=$?
    echo "$name: status $status after $((SECONDS - began)) s" | tee -a "$folder/summary.txt"
}

# Versions differ on such a machine, so that a warning is not an error.
tests() { # NAME SECONDS ARGUMENTS...
    part "$1" "$2" "$python" -m pytest -v -W default --junitxml "$folder/$1.xml" "${@:3}"
}

part machine 30 "$python" -c "
import torch, onnxruntime
print('torch', torch.__version__, 'CUDA', torch.version.cuda)
print('onnxruntime', onnxruntime.__version__, onnxruntime.get_available_providers())
print(torch.cuda.get_device_properties(0) if torch.cuda.is_available() else 'no GPU')"

if [ "$device" = cuda ]; then
    tests tests-runtime 90 -m "gpu and not slow" tests/albert_serve/runtime
    tests tests-training 130 -m "gpu and not slow" tests/training/loop
    training=(--shapes base --length 512 --rounds 2 --turn 6s)
    engine=(--shapes 1x32 8x128 32x512 --num-texts 512 --rounds 2)
else
    tests tests-runtime 90 tests/albert_serve/runtime/test_devices.py
    tests tests-training 130 -k "every_precision" tests/training/loop/test_devices.py
    training=(--shapes small --length 32 --batch-tokens 256 --rounds 1 --turn 1s --no-compile)
    engine=(--preset small --shapes 1x8 --num-texts 4 --rounds 1
        --contestants transformers-fp32 ours-fp32)
fi
part training 190 "$python" -m benchmarks.training --device "$device" \
    "${training[@]}" --output "$folder/training"
part engine 150 "$python" -m benchmarks.engine --device "$device" \
    "${engine[@]}" --output "$folder/engine"
