#!/usr/bin/env bash
# An agent on each machine of a hostfile, by ssh: examples/cluster/by_hostfile.sh hostfile --mesh data=4,tensor=4
# The kit lies in the same folder everywhere. REMOTE=here runs all agents on this machine, to try.
set -euo pipefail
file=$1; shift
mapfile -t lines < <(sed 's/#.*//' "$file" | grep -E '\S')
[ ${#lines[@]} -gt 0 ] || { echo "by_hostfile: expected lines like 'node1 slots=8' in $file, found none" >&2; exit 2; }
here=$(cd "$(dirname "$0")/../.." && pwd)
head=${lines[0]%% *} node=0
[ "${REMOTE:-ssh}" = here ] && head=127.0.0.1
for line in "${lines[@]}"; do
  host=${line%% *} slots=${line##*slots=}
  command="cd $here && PATH=$PATH torchrun --nnodes ${#lines[@]} --node-rank $node --nproc-per-node $slots --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint $head:${PORT:-29400} --rdzv-id ${JOB:-shardlings-$$} -m lab.train $*"
  if [ "${REMOTE:-ssh}" = here ]; then
    bash -c "${command/torchrun/torchrun --local-addr 127.0.0.1}" &
  else
    ssh "$host" "$command" &
  fi
  node=$((node + 1))
done
wait
