#!/bin/bash
# Trains on GKE as a JobSet, through xpk. Kubernetes starts all pods again, on other nodes if need
# be, when one of them ends with a code that deserves it; so no restart.sh is needed inside.
#
#   CLUSTER=tpus ZONE=us-west4-a PROJECT=mine TYPE=v5litepod-16 IMAGE=REGISTRY/paravt STORAGE=share \
#       examples/supervise/xpk.sh paravt-8b env HF_HOME=/share/hub paravt run --config=paravt_8b \
#       --run-dir /share/paravt_8b --data.folder /share/paravt
#
# STORAGE is a volume that `xpk storage attach` has made known, mounted at /share. It holds the run, the
# data and the downloads: what is in a pod is lost when the pod ends. IMAGE is a container that has the
# project installed (pip install -e '.[tpu]') and `paravt` on its PATH.
# 70: contact lost, 75: an outage or a full disk. xpk itself adds 127 to 255, among them 137 (killed,
# for example by lack of memory) and 143 (a node is taken away). FLAGS are for xpk, such as --spot.
set -euo pipefail
: "${CLUSTER:?}" "${ZONE:?}" "${PROJECT:?}" "${TYPE:?}" "${IMAGE:?}" "${STORAGE:?}" "${FLAGS:=}"
[ $# -gt 1 ] || { echo "give a name for the workload, and the command to run" >&2; exit 2; }
workload=$1
shift

# shellcheck disable=SC2086 # FLAGS are words
xpk workload create --workload="$workload" --command="$*" \
    --cluster="$CLUSTER" --zone="$ZONE" --project="$PROJECT" --tpu-type="$TYPE" \
    --docker-image="$IMAGE" --storage="$STORAGE" \
    --max-restarts=20 --restart-on-exit-codes=70,75 \
    --termination-grace-period-seconds=45 $FLAGS
