#!/bin/bash
# The front door beside Dynamo's frontend + mocker and sglang-router, with engines of equal timing, one interleaved run:
#
#     DYNAMO=VENV SGLANG=VENV benchmarks/router_peers.sh MODEL_FOLDER [options of router.py]
#
# Engines take no time; with PACED=1 a decode step takes 5.7 ms, which is what Dynamo's mocker simulates, and a prefill none.
# DYNAMO: a virtual environment with ai-dynamo; SGLANG: one with sglang-router; either may be left out. MODEL_FOLDER: whose
# tokenizer all of them use. Dynamo: one prefill and one decode mocker. sglang-router passes text on without tokenising:
# behind it are two processes of sse_mock.py, which cost next to nothing, so its rows bound what a proxy alone can do.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
model=$(realpath "$1")
shift
name=$(basename "$model")
step_us=${PACED:+5700}
step_us=${step_us:-0}
work=$(mktemp -d)
pids=()
peers=()
stop() {
    kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$work"
}
trap stop EXIT

start() { # LOG COMMAND...
    local log=$work/$1
    shift
    "$@" >"$log" 2>&1 &
    pids+=($!)
}

answers() { # URL: wait until it serves the model
    for _ in $(seq 120); do
        sleep 1
        curl -s -m 2 "$1/v1/models" | grep -q "$name" && return
    done
    tail -n 20 "$work"/*.log >&2
    return 1
}

if [[ -n ${DYNAMO:-} ]]; then
    export HF_HUB_OFFLINE=1 DYN_FILE_KV=$work/dynamo DYN_LOG=warn
    mkdir "$DYN_FILE_KV"
    planes=(--discovery-backend file --request-plane tcp --event-plane zmq)
    engine=(--model-path "$model" --model-name "$name" --speedup-ratio 1000 --kv-transfer-bandwidth 0
        --num-gpu-blocks-override 16384 --block-size 16 --max-num-seqs 512 --max-num-batched-tokens 4096)
    [[ $step_us = 0 ]] || engine+=(--decode-speedup-ratio 0.001)
    first=${#pids[@]}
    start dynamo.log "$DYNAMO/bin/python" -m dynamo.frontend --http-port 18900 "${planes[@]}"
    start prefill.log "$DYNAMO/bin/python" -m dynamo.mocker "${engine[@]}" "${planes[@]}" --disaggregation-mode prefill
    start decode.log "$DYNAMO/bin/python" -m dynamo.mocker "${engine[@]}" "${planes[@]}" --disaggregation-mode decode
    answers http://127.0.0.1:18900
    peers+=(--peer "dynamo=http://127.0.0.1:18900=$name=$(IFS=,; echo "${pids[*]:first}")")
fi
if [[ -n ${SGLANG:-} ]]; then
    first=${#pids[@]}
    start engine-0.log "$python" benchmarks/sse_mock.py 18911 "$name" "$step_us"
    start engine-1.log "$python" benchmarks/sse_mock.py 18912 "$name" "$step_us"
    sleep 1
    start sglang.log "$SGLANG/bin/sglang-router" launch --host 127.0.0.1 --port 18910 --policy round_robin \
        --worker-urls http://127.0.0.1:18911 http://127.0.0.1:18912 --prometheus-port 18913 --log-level warn \
        --max-concurrent-requests 1024
    answers http://127.0.0.1:18910
    peers+=(--peer "sglang-router=http://127.0.0.1:18910=$name=$(IFS=,; echo "${pids[*]:first}")")
fi
"$python" benchmarks/router.py --decode-us "$step_us" --model "$model" "${peers[@]}" "$@"
