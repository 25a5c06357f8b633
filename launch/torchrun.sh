#!/usr/bin/env bash
# Runs distmega on the ranks of torchrun, on this machine:
#
#     launch/torchrun.sh 2 generate MODEL "prompt" --tp 2
#
# PYTHON names another python3. Over several machines, give torchrun itself --nnodes and --rdzv-endpoint.
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: launch/torchrun.sh NUM_RANKS COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
num_ranks=$1
shift
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "$num_ranks" -m distmega "$@"
