#!/bin/sh
# Makes the pinned Python environment: .kernelfleet/python with PyTorch, nvcc's packages and, with
# `dev`, the tools that `make test` needs. Does nothing where it is already right: a stamp holds the
# digests of the lock files that were installed.
#
# usage: environment.sh [runtime|dev]     KERNELFLEET_BASE_PYTHON picks the interpreter (3.11 or later)
set -eu

want=${1:-runtime}
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
home=$root/.kernelfleet
python=$home/python
stamp=$python/kernelfleet.stamp
needed_mib=8192

say() { printf 'environment: %s\n' "$*" >&2; }
stop() {
    say "$1"
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

case $want in
    runtime) lock=requirements.lock ;;
    dev) lock=requirements-dev.lock ;;
    *) stop "unknown environment \`$want\`" "allowed: runtime, dev" ;;
esac

line() { printf '%s %s' "$1" "$(sha256sum <"$root/agent-image/$1" | cut -d' ' -f1)"; }
runtime_line=$(line requirements.lock)
wanted_line=$(line "$lock")
if [ -x "$python/bin/python" ] && [ -f "$stamp" ] && grep -qxF "$wanted_line" "$stamp"; then
    exit 0
fi

# Two calls at once (two terminals, two make targets) wait for each other.
mkdir -p "$home"
if command -v flock >/dev/null 2>&1 && [ -z "${KERNELFLEET_LOCKED:-}" ]; then
    KERNELFLEET_LOCKED=1 exec flock "$home/lock" "$0" "$want"
fi

began=$(date +%s)
suits() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
base=
for candidate in ${KERNELFLEET_BASE_PYTHON:-} python3 python3.12 python3.11 python3.13; do
    if command -v "$candidate" >/dev/null 2>&1 && suits "$candidate"; then
        base=$candidate
        break
    fi
done
if [ -z "$base" ]; then
    found=$(python3 --version 2>/dev/null || echo 'no python3')
    stop "Python 3.11 or later is needed, found: $found" \
        "Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv python3-dev" \
        "or name one: KERNELFLEET_BASE_PYTHON=/path/to/python3.12 make env"
fi
if ! "$base" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    stop "$base has no venv module, so no environment can be made with it" \
        "Debian, Ubuntu: apt-get install python3-venv"
fi

if [ ! -x "$python/bin/python" ] || ! suits "$python/bin/python" || [ ! -x "$python/bin/pip" ]; then
    free_mib=$(df -Pm "$home" | awk 'NR == 2 { print $4 }')
    if [ "$free_mib" -lt "$needed_mib" ]; then
        stop "$((free_mib / 1024)) GiB are free in $home, 8 GiB are needed (5.1 GB installed, the rest while pip unpacks)" \
            "free some space, or put it elsewhere: mkdir -p /big/disk/kernelfleet && ln -s /big/disk/kernelfleet $home"
    fi
    say "1/2 virtual environment with $("$base" --version 2>&1) in .kernelfleet/python"
    rm -rf "$python"
    "$base" -m venv "$python"
    say "1/2 done in $(($(date +%s) - began)) s"
else
    say "1/2 virtual environment: there already"
fi

say "2/2 packages of agent-image/$lock: PyTorch, CUDA libraries, nvcc (about 2.6 GB to download, 5.1 GB on disk)"
fetch=$(date +%s)
rm -f "$stamp"
if ! PIP_DISABLE_PIP_VERSION_CHECK=1 "$python/bin/python" -m pip install --quiet --progress-bar off --require-hashes \
    --only-binary :all: -r "$root/agent-image/$lock" >&2; then
    stop "pip could not install agent-image/$lock (its own message is above)" \
        "no network or a proxy: set PIP_INDEX_URL or HTTPS_PROXY and start again, what is there is kept" \
        "anything else: rm -rf .kernelfleet/python and start again"
fi
{
    printf '%s\n' "$runtime_line"
    [ "$lock" = requirements.lock ] || printf '%s\n' "$wanted_line"
} >"$stamp"
say "2/2 done in $(($(date +%s) - fetch)) s, $(du -sm "$python" | cut -f1) MB on disk"
