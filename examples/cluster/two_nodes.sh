#!/usr/bin/env bash
# Two torchrun agents, as on two machines, here both on this one: examples/cluster/two_nodes.sh --mesh data=2 --steps 20
# On a real cluster each machine runs the torchrun line once, with its own NODE and the first machine's name as HEAD.
set -euo pipefail
cd "$(dirname "$0")/../.."
HEAD=${HEAD:-127.0.0.1} PORT=${PORT:-29400} JOB=${JOB:-shardlings-$$}

agent() {
  torchrun --nnodes 2 --node-rank "$1" --nproc-per-node "${PER_NODE:-1}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$JOB" ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    -m lab.train "${@:2}"
}

if [ -n "${NODE:-}" ]; then
  agent "$NODE" "$@"
else
  export LOCAL_ADDR=127.0.0.1
  agent 1 "$@" &
  agent 0 "$@"
  wait
fi
