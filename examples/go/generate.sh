#!/bin/sh
# Makes isthmusv1/ from the published schema. Needs protoc, protoc-gen-go and protoc-gen-go-grpc:
#   Debian: apt-get install golang-go golang-google-grpc-dev golang-google-protobuf-dev \
#           protobuf-compiler protoc-gen-go protoc-gen-go-grpc
# Then, with modules: go mod tidy && go run . HOST:PORT
# or with Debian's packages only:
#   GO111MODULE=off GOPATH=WORK:/usr/share/gocode go run -tags debian isthmus.example/client HOST:PORT
#   where WORK/src/isthmus.example/client is this folder
set -eu
cd "$(dirname "$0")"
protos=${PROTOS:-../../protos}
files="isthmus/v1/common.proto isthmus/v1/generation.proto isthmus/v1/inference_service.proto"
# The schema names no Go package: it is the client's to choose.
options=paths=import,module=isthmus.example/client
for file in $files; do
    options="$options,M$file=isthmus.example/client/isthmusv1"
done
# shellcheck disable=SC2086  # one argument for each file
protoc -I "$protos" --go_out=. --go_opt="$options" --go-grpc_out=. --go-grpc_opt="$options" $files
