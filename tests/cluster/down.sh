#!/usr/bin/env bash
# Ends the cluster and leaves nothing: processes, mounts, links, namespaces, cgroups, files. What the cluster started is
# found by its cgroup, what it mounted and filtered goes with its namespaces. Programs and images stay cached.
#
# usage: down.sh
. "$(dirname "$0")/lib.sh"
need_root
[ -e "$state" ] || [ -e "$run" ] || ip link show "$bridge" >/dev/null 2>&1 || { say "nothing is up"; exit 0; }
# Of another checkout: its folder is named by the addresses in its containerd.
if [ ! -e "$state" ] && [ -e "$run" ] && [ -n "$(members $group)" ]; then
    stop "the cluster that is up belongs to another checkout" "make cluster-down in the checkout whose .kernelfleet/cluster/state exists"
fi

# Whoever would start something anew goes first.
for pid in "$state"/controllers.pid "$state"/node*/kubelet.pid; do [ -f "$pid" ] && kill "$(cat "$pid")" 2>/dev/null; done || true
for _ in $(seq 100); do
    left=$(members $group)
    [ -n "$left" ] || break
    # shellcheck disable=SC2086
    kill -KILL $left 2>/dev/null || true
    sleep .1
done
[ -z "$(members $group)" ] || stop "processes that can't be ended:" "$(members $group | xargs -r ps -o pid,stat,args -p)"

for namespace in /run/netns/kf-node*; do [ -e "$namespace" ] && ip netns del "$(basename "$namespace")"; done || true
# `ip netns` mounts the folder over itself; where nobody else has a namespace in it, it is as it was before.
if [ -d /run/netns ] && [ -z "$(ls -A /run/netns)" ]; then
    umount /run/netns 2>/dev/null || true
    rmdir /run/netns 2>/dev/null || true
fi
ip link del "$bridge" 2>/dev/null || true
# A veth pair goes with its namespace, in the kernel's own time.
for _ in $(seq 50); do ip -br link | grep -q '^kf-v' || break; sleep .1; done
for hierarchy in $(hierarchies); do
    [ -d "$hierarchy/$group" ] && find "$hierarchy/$group" -depth -type d -exec rmdir {} + 2>/dev/null
done || true
# Mounts lived in the nodes' own namespaces; none may be left here, or removing files would reach through it.
left=$(awk -v a="$state/" -v b="$run/" 'index($2, a) == 1 || index($2, b) == 1 { print $2 }' /proc/mounts | sort -r)
[ -z "$left" ] || echo "$left" | xargs -r umount -l
rm -rf --one-file-system "$state" "$run" "$kubeconfig"
rmdir /var/lib/kubelet 2>/dev/null || true
say "down"
