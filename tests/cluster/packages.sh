#!/bin/sh
# Installs the Debian packages that the test bed needs and this machine lacks. For CI and for bare machines; as root.
#
# usage: packages.sh
set -eu
wanted=''
for pair in containerd:containerd runc:runc iptables:iptables ipset:ipset ip:iproute2 openssl:openssl \
    buildah:buildah mmdebstrap:mmdebstrap strip:binutils; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || wanted="$wanted ${pair##*:}"
done
[ -n "$wanted" ] || exit 0
echo "cluster: installing$wanted" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $wanted >/dev/null
