#!/bin/bash
# Trains on a spot slice. When the slice is taken away, its queued resource cannot start again: it is
# deleted and created anew, and the run goes on from its last checkpoint.
#
#   NAME=paravt ZONE=us-west4-a TYPE=v5litepod-16 IMAGE=v2-alpha-tpuv5-lite SETUP=setup.sh \
#       examples/supervise/queued_resource.sh .venv/bin/paravt run --config=paravt_8b
#
# SETUP is a script that makes a new host ready: it mounts a share as ~/share, which holds `runs`, `data`
# and the downloads, and installs the project in ~/paravt-jax. setup.sh beside this file does that, once
# its first lines name your share. A host that is half set up runs it again, so each of its steps must
# bear repetition. This script ends with the code of the run. After Ctrl-C the slice and the run go on;
# the same command watches them again. To start a run anew on a slice where it has ended, delete
# ~/paravt-jax/started on all hosts.
set -uo pipefail
: "${NAME:?}" "${ZONE:?}" "${TYPE:?}" "${IMAGE:?}" "${SETUP:?}" "${EVERY:=60}"
[ $# -gt 0 ] || { echo "give the command to run" >&2; exit 2; }

queued() { gcloud compute tpus queued-resources "$1" "$NAME" --zone="$ZONE" "${@:2}"; }
on() { gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker="$1" --command="$2"; }
say() { echo "$(date +%T) $*" >&2; }

create() {
    say "creating $NAME"
    queued create --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$IMAGE" --spot
}

# On every host: the file `code` appears when the command has ended there.
begin() {
    local command
    command=$(printf "%q " "$@")
    on all "$(cat "$SETUP")" || return
    on all "cd paravt-jax && rm -f code && cat >command.sh <<'END'
export HF_HOME=\$HOME/share/hub
examples/supervise/restart.sh ${command% }
echo \$? >code
END
{ nohup bash command.sh >>run.log 2>&1 </dev/null & } && touch started"
}

running=""
while true; do
    state=$(queued describe --format="value(state.state)" 2>/dev/null)
    case $state in
    "")
        running=""
        create || say "not created; trying again"
        ;;
    FAILED | SUSPENDING | SUSPENDED)
        say "$NAME is $state"
        running=""
        # One that is being suspended cannot be deleted yet.
        queued delete --force --quiet && continue
        say "not deleted; trying again"
        ;;
    ACTIVE)
        # Another start of this script may have begun the run.
        if [ -z "$running" ] && ! on all "test -e paravt-jax/started" 2>/dev/null; then
            say "$NAME is active; starting"
            begin "$@" || { say "not started; trying again"; sleep "$EVERY"; continue; }
        fi
        running=yes
        code=$(on 0 "cat paravt-jax/code" 2>/dev/null)
        if [ -n "$code" ]; then
            say "the run has ended with code $code; $NAME still exists, and costs"
            exit "$code"
        fi
        ;;
    esac
    sleep "$EVERY"
done
