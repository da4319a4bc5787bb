#!/bin/bash
# Everything about hand-offs that two GPUs of one host are needed for, in under ten minutes; JSON and logs into FOLDER.
#
#   benchmarks/two_gpus.sh FOLDER [WHEEL]
#
# WHEEL: a nixl wheel that is unpacked first, for a machine without an index. Needs torch with triton, numpy, protobuf,
# grpcio, pytest with hypothesis and asyncio, and the generated code under protos/gen (python protos/generate.py).
set -u
out=$(realpath -m "${1:?where to write}")
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$out"
path=libs/core/src:libs/kvtransfer/src:protos/gen:tests/support:benchmarks
if [ $# -gt 1 ]; then
    python3 -m zipfile -e "$2" "$out.nixl" && path=$path:$out.nixl
fi
export PYTHONPATH=$path
status=0

step() { # name, seconds, command: each has its own limit, so that one that hangs takes no other's time
    local name=$1 limit=$2
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    echo "$name: exit code $code" | tee -a "$out/summary.txt"
    [ $code -eq 0 ] || status=1
}

nvidia-smi --query-gpu=name,driver_version --format=csv >"$out/machine.txt"
python3 -c 'import torch, triton; print(torch.__version__, triton.__version__)' >>"$out/machine.txt"
run="python3 benchmarks/transfer.py --device cuda"
if command -v compute-sanitizer >/dev/null; then
    step sanitizer 100 compute-sanitizer --error-exitcode 9 \
        python3 -m pytest -p no:cacheprovider -m gpu -q tests/integration/test_bounce_cuda.py
fi
step transfers-256 130 $run --mib 256 --deadline 100 --json "$out/transfers-256.json"
step transfers-1024 150 $run --mib 1024 --deadline 110 --json "$out/transfers-1024.json"
step regret 180 $run --regret 200 --json "$out/regret.json"
exit $status
