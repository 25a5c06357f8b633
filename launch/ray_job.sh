#!/usr/bin/env bash
# Runs distmega as a job of a running Ray cluster, and prints its answer:
#
#     RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 launch/ray_job.sh RESULT generate MODEL "prompt" --tp 2
#
# The job runs on the cluster's head node with the python3 of PATH there (PYTHON names another), and starts its ranks
# through Ray; commands that start none, such as doctor, run there as they are. RESULT, a path that this machine and the
# head node share, gets what the command prints, RESULT.code its exit code: that of `ray job submit` says only whether
# the job ran.
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: launch/ray_job.sh RESULT COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
result=$(realpath --canonicalize-missing "$1")
shift
rm -f "$result" "$result.code"
if [ -z "${RAY_AUTH_MODE:-}" ] && { [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -e "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; }; then
  export RAY_AUTH_MODE=token  # where there is a token, `ray start` demands it, and `ray job submit` (2.60) forgets it
fi
case $1 in generate | perplexity | trace) set -- "$@" --launcher ray ;; esac
command=$(printf '%q ' "${PYTHON:-python3}" -m distmega "$@")
ray job submit --log-style record -- \
  bash -c "$command >$(printf %q "$result"); echo \$? >$(printf %q "$result.code")" >&2 || true
if [ ! -e "$result.code" ]; then
  echo "launch/ray_job.sh: no $result.code came back; expected a job that ran, and a path that the cluster's head shares" >&2
  exit 1
fi
cat "$result"
exit "$(cat "$result.code")"
