# What the scripts of the test bed share: where things lie, how they say what they do, how they wait.
# Sourced, never run. Knows nothing of kernelfleet itself.
# shellcheck shell=bash disable=SC2034
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(CDPATH='' cd -- "$here/../.." && pwd -P)
# Programs and images are kept between clusters, the state of one is not.
mkdir -p "$root/.kernelfleet/cluster/bin"
home=$(CDPATH='' cd -- "$root/.kernelfleet/cluster" && pwd -P)
bin=$home/bin
state=$home/state
# Sockets: their paths have to be short.
run=/run/kernelfleet
kubeconfig=$home/kubeconfig
# One cgroup holds all that the cluster ever starts, so that `down` needs no names. Another name is for a second cluster, in
# a network and a mount namespace of its own.
group=${KERNELFLEET_CLUSTER_GROUP:-kernelfleet}

bridge=kf0
host_ip=10.77.0.1
pods=10.88.0.0/16
services=10.96.0.0/16
node_ip() { echo "10.77.0.$((10 + $1))"; }
node_pods() { echo "10.88.$1.0/24"; }
node_ns() { echo "kf-node$1"; }
# Numbers of the nodes that were started.
nodes() { for d in "$state"/node*/; do [ -d "$d" ] && basename "$d" | sed 's/^node//'; done; true; }

say() { printf 'cluster: %s\n' "$*" >&2; }
# Ends with a message and, indented, what to do.
stop() {
    say "$1"
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

# Each program with the Debian package that brings it; all that is missing is named at once.
need() {
    local missing='' program package
    for pair in "$@"; do
        program=${pair%%:*} package=${pair##*:}
        command -v "$program" >/dev/null 2>&1 || missing="$missing $package"
    done
    [ -z "$missing" ] || stop "missing:$missing" "Debian, Ubuntu: apt-get install --no-install-recommends$missing"
}

need_root() { [ "$(id -u)" = 0 ] || stop "a cluster needs root (namespaces, cgroups, mounts)" "sudo make cluster"; }

# Where cgroup hierarchies are mounted: one with version 2, one a controller with version 1.
hierarchies() { awk '$3 == "cgroup" || $3 == "cgroup2" { print $2 }' /proc/mounts; }
# The one by which processes are found again.
tracked() { hierarchies | grep -m1 /pids || hierarchies | head -n1; }
# Gives what is below the cgroup $1 all the controllers that it has: version 2 asks for that, version 1 has nothing to give.
controllers() {
    local controller
    [ -f "$1/cgroup.controllers" ] || return 0
    for controller in $(cat "$1/cgroup.controllers"); do
        echo "+$controller" >"$1/cgroup.subtree_control" || say "$1 can't give $controller to what is below it"
    done
}
# Gives all that the cluster runs a weight for the processors, where 100 is what any other group has. Version 1 counts to 1024.
weigh() {
    local hierarchy file weighed=''
    for hierarchy in $(hierarchies); do
        file=$hierarchy/$group/cpu.weight
        [ ! -f "$file" ] || { echo "$1" >"$file" && weighed=yes; }
        file=$hierarchy/$group/cpu.shares
        [ ! -f "$file" ] || { echo $(($1 * 1024 / 100)) >"$file" && weighed=yes; }
    done
    [ -n "$weighed" ] || say "the cluster weighs what any other group does: the cgroup $group has no weight for processors"
}
# Processes of the cgroup $1 and all below it.
members() {
    local top
    top=$(tracked)/$1
    [ -d "$top" ] || return 0
    # A group may go while it is read, which is no failure.
    { find "$top" -name cgroup.procs -exec cat {} + 2>/dev/null || true; } | sort -un
}

alive() { [ -f "$state/$1.pid" ] && kill -0 "$(cat "$state/$1.pid")" 2>/dev/null; }

# start NAME COMMAND..: in the background, in the cluster's cgroup, output to state/log/NAME.
start() {
    local name=$1 leaf
    shift
    leaf=$(tracked)/$group/daemons
    mkdir -p "$leaf" "$state/log" "$(dirname "$state/$name.pid")"
    # 9 is the lock of `make cluster`, which daemons must not hold.
    setsid bash -c 'echo $$ >"$1/cgroup.procs"; echo $$ >"$2"; shift 2; exec "$@"' start "$leaf" "$state/$name.pid" "$@" \
        >"$state/log/${name//\//-}" 2>&1 </dev/null 9>&- &
    disown
}

# wait_for SECONDS DAEMON WHAT COMMAND..: until the command succeeds; says what it waited for, and shows the daemon's last words.
wait_for() {
    local seconds=$1 daemon=$2 what=$3 end
    shift 3
    end=$(($(date +%s) + seconds))
    until "$@" >/dev/null 2>&1; do
        if [ -f "$state/$daemon.pid" ] && ! alive "$daemon"; then
            tail -n 15 "$state/log/${daemon//\//-}" >&2
            stop "$daemon ended while waiting for $what" "its whole output: $state/log/${daemon//\//-}" "clean up with: make cluster-down"
        fi
        if [ "$(date +%s)" -ge "$end" ]; then
            tail -n 15 "$state/log/${daemon//\//-}" >&2
            stop "waited $seconds s in vain for $what" "output of $daemon: $state/log/${daemon//\//-}" "clean up with: make cluster-down"
        fi
        sleep .2
    done
}
