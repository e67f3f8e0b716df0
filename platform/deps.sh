#!/usr/bin/env bash
# Installs what is missing, with apt: as root, or through sudo. What is missing is decided by what is there, so on another system
# it is enough that the compilers, headers and programs below exist. Prints nothing when nothing is missing.
set -euo pipefail

missing=()
program() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
header() {
    local directory
    for directory in /usr/include /usr/local/include /usr/include/*-linux-gnu; do
        [ -e "$directory/$1" ] && return
    done
    echo "#include <$1>" | "${CXX:-g++}" -x c++ -fsyntax-only - >/dev/null 2>&1 || missing+=("$2")
}

program g++ g++
program make make
program mpirun mpich
program mpicxx libmpich-dev
header dnnl.h libdnnl-dev
header doctest/doctest.h doctest-dev
header nlohmann/json.hpp nlohmann-json3-dev
header CLI/CLI.hpp libcli11-dev
header boost/context/fiber.hpp libboost-context-dev
header zlib.h zlib1g-dev
header sentencepiece_processor.h libsentencepiece-dev
[ -z "${MAKE_FUZZ:-}" ] || program clang++ clang
[ -n "${MAKE_DATA:-}" ] || program bible bible-kjv

if [ ${#missing[@]} -gt 0 ]; then
    install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}")
    if ! command -v apt-get >/dev/null 2>&1; then
        # Without apt, the text of `make run` is no reason to stop
        [ "${missing[*]}" = bible-kjv ] && exit 0
        echo "make deps: this system has no apt; install what Debian calls: ${missing[*]}" >&2
        exit 1
    elif [ "$(id -u)" = 0 ]; then
        prefix=()
    elif command -v sudo >/dev/null 2>&1; then
        prefix=(sudo)
    else
        echo "make deps: needs root or sudo to install: ${missing[*]}" >&2
        exit 1
    fi
    echo "installing: ${missing[*]}"
    "${prefix[@]}" apt-get update -q
    "${prefix[@]}" "${install[@]}"
fi

mpicxx=$(command -v mpicxx.mpich || command -v mpicxx)
if ! "$mpicxx" -show 2>/dev/null | grep -q mpich; then
    echo "make deps: $mpicxx is not MPICH's; this project is written for and tested with MPICH only (Debian: mpich, libmpich-dev)" >&2
    exit 1
fi
