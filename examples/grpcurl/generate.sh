#!/bin/sh
# Streams an answer with grpcurl; the server describes itself by reflection.  Usage: generate.sh [HOST:PORT] [PROMPT]
set -eu
address=${1:-127.0.0.1:50051}
prompt=${2:-The capital of France is}
# Quotes and backslashes of the prompt must be escaped for JSON.
escaped=$(printf '%s' "$prompt" | sed 's/\\/\\\\/g; s/"/\\"/g')
# The header is for routers that ask for an API key; others do not look at it.
exec grpcurl -plaintext -H "authorization: Bearer ${ISTHMUS_API_KEY:-}" -d "{\"prompt\": \"$escaped\", \"max_tokens\": 16}" \
    "$address" isthmus.v1.InferenceService/Generate
