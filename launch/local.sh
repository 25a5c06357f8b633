#!/usr/bin/env bash
# Runs distmega on processes of this machine, which it starts itself:
#
#     launch/local.sh generate MODEL "prompt" --tp 2
#
# PYTHON names another python3.
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: launch/local.sh COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
exec "${PYTHON:-python3}" -m distmega "$@" --launcher local
