#!/bin/bash
# Everything about hand-offs that GPUs are needed for; JSON and logs into FOLDER. `tests` and `figures` take less than ten
# minutes each. With two GPUs a cache goes from one to the other; with one both instances are on it.
#
#   benchmarks/gpu.sh FOLDER tests|figures|all [WHEEL...]
#
# ONLY in the environment: names of the steps to take. WHEELs are unpacked first, for a machine without an index. Needs
# torch with triton, transformers, nixl and what the packages under libs/ and services/worker/ depend on, pytest for the
# tests, and the generated code under protos/gen (python protos/generate.py). FlashInfer's kernels are tested where it is
# installed. With two GPUs the generation side has the second one.
set -u
out=$(realpath -m "${1:?where to write}") what=${2:?tests, figures or all}
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
for wheel in "${@:3}"; do
    python3 -m zipfile -e "$wheel" "$site"
done
path=protos/gen:tests/support:benchmarks
for package in libs/core libs/kvtransfer libs/client services/worker; do
    path=$path:$package/src
    # Run from the tree, not installed: but versions are looked up.
    python3 - "$package/pyproject.toml" "$site" <<'PYTHON'
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]
folder = pathlib.Path(sys.argv[2], f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
PYTHON
done
path=$(realpath -m ${path//:/ } | paste -sd:):$site
export PYTHONPATH=$path:${PYTHONPATH:-} PYTHONUNBUFFERED=1
status=0

step() { # name, seconds, command: each has its own limit, so that one that hangs takes no other's time
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    echo "$name: exit code $code, $((SECONDS - began)) s" | tee -a "$out/summary.txt"
    tail -n 3 "$out/$name.log"
    [ $code -eq 0 ] || status=1
}

tests() {
    local pytest="python3 -m pytest -p no:cacheprovider -m gpu -q -s"
    # Compiling takes the processor, not the GPU.
    step flashinfer 400 $pytest -k flashinfer tests/integration/test_torch_cuda.py &
    if command -v compute-sanitizer >/dev/null; then
        step sanitizer 60 compute-sanitizer --error-exitcode 9 $pytest tests/integration/test_bounce_cuda.py
    fi
    step kernels 40 $pytest tests/integration/test_bounce_cuda.py
    step spin 90 $pytest tests/integration/test_spin_cuda.py
    step bf16 180 $pytest -k "bytes or bfloat16" tests/parity/test_parity_bytes_cuda.py tests/parity/test_parity_cuda.py
    step float32 150 $pytest -k float32 tests/parity/test_parity_cuda.py
    step drain 70 python3 benchmarks/drain_time.py --path cuda --trials 5
    step torch 60 $pytest -k "not flashinfer" tests/integration/test_torch_cuda.py \
        tests/integration/test_sampling_cuda.py
    step host-tier 40 $pytest tests/integration/test_host_tier_cuda.py
    wait
    step transfers-mixed 70 python3 benchmarks/transfer.py --device mixed --mib 256 --case contiguous "NHD, TP2" \
        --deadline 45 --json "$out/transfers-mixed.json"
    step posting 50 python3 benchmarks/transfer_posting.py --quick --device cuda --json "$out/posting.json"
}

figures() {
    local transfer="python3 benchmarks/transfer.py --device cuda"
    step chunked-prefill 140 python3 benchmarks/chunked_prefill.py --device cuda:0 --chunk 1024 --block 32 \
        --generation-device "cuda:$(($(nvidia-smi -L | wc -l) - 1))" --deadline 100 --json "$out/chunked-prefill.json"
    step transfers-256 115 $transfer --mib 256 --deadline 90 --json "$out/transfers-256.json"
    step regret 330 $transfer --regret 200 --json "$out/regret.json"
    step transfers-1024 115 $transfer --mib 1024 --deadline 90 --json "$out/transfers-1024.json"
}

nvidia-smi --query-gpu=name,driver_version --format=csv >"$out/machine.txt"
python3 -c 'import torch, triton; print(torch.__version__, triton.__version__)' >>"$out/machine.txt"
case $what in
tests) tests ;;
figures) figures ;;
all) figures; tests ;;
*) echo "$what: tests, figures or all" >&2 && exit 2 ;;
esac
# A step in the background has told its code to the summary only.
grep -q "exit code [1-9]" "$out/summary.txt" && status=1
exit $status
