#!/bin/bash
# Makes a new host of a slice ready: SETUP of queued_resource.sh, or by hand on all hosts. Fill in the
# first two lines. A second start changes nothing.
SHARE=10.0.0.2:/share
REPOSITORY=https://github.com/OWNER/paravt-jax

set -e
if ! command -v mount.nfs >/dev/null || ! python3.11 -c 'import ensurepip' 2>/dev/null; then
    sudo apt-get update
    sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.11-venv nfs-common
fi
mkdir -p ~/share
if ! mountpoint -q ~/share; then
    sudo mount "$SHARE" ~/share
    sudo chown "$USER" ~/share
fi
[ -d ~/paravt-jax/.git ] || git clone "$REPOSITORY" ~/paravt-jax
cd ~/paravt-jax
[ -x .venv/bin/python ] || python3.11 -m venv .venv
.venv/bin/pip install --quiet -e '.[tpu]'
ln -sfn ~/share runs
ln -sfn ~/share data
