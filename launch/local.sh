#!/usr/bin/env bash
# Runs distmega on processes of this machine, which it starts itself:
#
#     launch/local.sh generate MODEL "prompt" --tp 2
#
# Commands that start no ranks, such as doctor and explain, run as they are. PYTHON names another python3.
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: launch/local.sh COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
case $1 in generate | perplexity | trace) set -- "$@" --launcher local ;; esac
exec "${PYTHON:-python3}" -m distmega "$@"
