#!/bin/bash
# Starts a command again when its exit code says that this may help: 70 (contact with another process
# was lost, or something unforeseen happened), 75 (a full disk, an outage), or a signal such as SIGKILL.
#
#   examples/supervise/restart.sh paravt run --config=paravt_8b
#
# After any other code, after a SIGTERM or Ctrl-C of yours, and after STARTS starts, it ends with the
# code of the command. On several hosts, start it on each of them.
set -uo pipefail
: "${STARTS:=20}" "${PAUSE:=30}"
[ $# -gt 0 ] || { echo "give the command to run" >&2; exit 2; }

stopped=""
child=""
# The command saves and ends by itself.
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT HUP

code=143 # of a stop before the first start
for ((start = 1; start <= STARTS; start++)); do
    [ -z "$stopped" ] || exit "$code"
    "$@" &
    child=$!
    # It came before there was a child to tell.
    [ -z "$stopped" ] || kill -TERM "$child" 2>/dev/null
    # A signal ends `wait`, but not the command.
    while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done
    child=""
    [ -z "$stopped" ] || exit "$code"
    case $code in
    70 | 75 | 13[1-9] | 14[0-24-9]) echo "restart.sh: code $code; starting again in $PAUSE s" >&2 ;;
    *) exit "$code" ;;
    esac
    # In the background: a signal ends `wait`, but not `sleep`.
    sleep "$PAUSE" &
    wait $!
done
exit "$code"
