#!/usr/bin/env bash
# Two machines on one: network namespaces, joined by a link of 200 Mbit/s. Needs root, and iproute2.
#   two_machines.sh up                     make both, and the link
#   two_machines.sh node 0 --mesh data=rest --fsdp --steps 200     the agent of a machine; the same with 1 in another terminal
#   two_machines.sh saved 2 .cache/two     wait until the last checkpoint in a folder is of so many ranks
#   two_machines.sh kill 1                 kill -9 everything on a machine
#   two_machines.sh down                   remove both
set -euo pipefail
cd "$(dirname "$0")/../.."
what=$1 machine=${2:-} name=shardlings
case $what in
  up)
    ip link add $name-0 type veth peer name $name-1
    for i in 0 1; do
      ip netns add $name-$i
      ip link set $name-$i netns $name-$i
      ip -n $name-$i addr add 10.77.0.1$i/24 dev $name-$i
      ip -n $name-$i link set lo up
      ip -n $name-$i link set $name-$i up
      tc -n $name-$i qdisc add dev $name-$i root tbf rate "${RATE:-200mbit}" burst 64kb latency 100ms
    done ;;
  node)
    # --nnodes 1:2: one machine is enough, and two are welcome. is_host: machine 0 keeps the store where they meet.
    # Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE a machine that comes back would wait for an address that nobody sends.
    exec ip netns exec $name-"$machine" env GLOO_SOCKET_IFNAME=$name-"$machine" OMP_NUM_THREADS=1 \
      TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "${PYTHON:-python}" -m torch.distributed.run --nnodes 1:2 --nproc-per-node "${PER_NODE:-1}" --max-restarts 9 \
      --rdzv-backend c10d --rdzv-endpoint 10.77.0.10:29400 --rdzv-id "${JOB:-two}" --local-addr 10.77.0.1"$machine" \
      --rdzv-conf last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5,is_host=$((1 - machine)) \
      -m lab.train "${@:3}" ;;
  saved)
    until [ "$(grep -o '[0-9-]*\.safetensors' "$3/checkpoint/index.json" 2>/dev/null | sort -u | wc -l)" = "$2" ]; do
      sleep 0.2
    done ;;
  kill) ip netns pids $name-"$machine" | xargs -r kill -9 ;;
  down)
    for i in 0 1; do
      ip netns pids $name-$i | xargs -r kill -9
      ip netns del $name-$i
    done ;;
  *) echo "expected up, node, saved, kill or down, got $what" >&2; exit 2 ;;
esac
