#!/usr/bin/env bash
# Packs what a machine with a card needs to run the cluster and can't build: the programs of the test bed, containerd, runc, ip,
# iptables and ipset from Debian, kernelfleet, the rendered chart. About 80 MB, in .kernelfleet/card. To be run where
# `make build` and tests/cluster/build.sh run; `tests/gpu/run.sh cluster` then runs on the other machine with this folder there.
#
# usage: pack.sh [PROGRAM]     target/release/kernelfleet if nothing is said
. "$(dirname "$0")/../../cluster/lib.sh"

program=${1:-$root/target/release/kernelfleet}
[ -x "$program" ] || stop "no program $program" "make it with: make build"
need xz:xz-utils strip:binutils dpkg-deb:dpkg apt-get:apt
"$here/build.sh"
"$here/build.sh" card
out=$root/.kernelfleet/card
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$out"
mkdir -p "$out" "$work"/{bin,debian,debs}
(
    cd "$work/debs"
    apt-get download containerd runc iproute2 iptables ipset libbpf1 libelf1 libmnl0 libcap2 libip4tc2 libip6tc2 libxtables12 \
        libnftnl11 libnfnetlink0 libnetfilter-conntrack3 libipset13 libseccomp2 >/dev/null 2>&1
) || stop "the packages of containerd, runc, iproute2, iptables and ipset could not be downloaded" "apt-get update"
for package in "$work"/debs/*.deb; do dpkg-deb --extract "$package" "$work/debian"; done
rm -rf "$work/debian/usr/share" "$work/debian/usr/bin/"containerd-{shim,shim-runc-v1,stress} "$work/debian/etc"
for name in kube kube-router bridge loopback host-local pause card; do cp "$bin/$name" "$work/bin/"; done
strip -o "$work/bin/kernelfleet" "$program"
find "$work/debian" -type f -perm -u+x -exec strip {} + 2>/dev/null || true
kubernetes=$(awk '$1 == "k8s.io/kubernetes" { print $2; exit }' "$here/kube/go.mod")
"$bin/helm" template kernelfleet "$root/charts/kernelfleet" --namespace kernelfleet-system --kube-version "$kubernetes" \
    --set image.repository=localhost/kernelfleet --set image.tag=dev --set image.pullPolicy=Never >"$out/chart.yaml"
tar -C "$work" -cf - bin debian | xz -T0 -6e >"$out/programs.tar.xz"
say "packed in $out: $(du -sh "$out" | cut -f1)"
