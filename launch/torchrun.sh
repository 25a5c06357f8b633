#!/usr/bin/env bash
# Runs distmega on the ranks of torchrun, on this machine:
#
#     launch/torchrun.sh 2 generate MODEL "prompt" --tp 2
#
# PYTHON names another python3. Over several machines, give torchrun itself --nnodes and --rdzv-endpoint.
#
# Nothing listens beyond loopback: the agent, whose stores listen at all addresses (--standalone too), gets a
# nameless file of this user instead, and rank 0 opens the store of the ranks. Ctrl-C ends it with 130.
set -euo pipefail

if [ $# -lt 2 ] || ! [[ $1 =~ ^([1-9][0-9]*|auto|cpu|gpu)$ ]]; then
  echo "usage: launch/torchrun.sh NUM_RANKS COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
num_ranks=$1
shift
store=$(mktemp)
exec 9<>"$store"
rm "$store"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${PYTHON:-python3}" -m distmega.launch.agent --nnodes 1 --nproc-per-node "$num_ranks" --local-addr 127.0.0.1 \
  --rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint /dev/fd/9 -m distmega "$@"
