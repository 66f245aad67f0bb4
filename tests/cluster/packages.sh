#!/bin/sh
# Installs the Debian packages that the test bed needs and this machine lacks, where that can be done: as root, with
# apt-get. Elsewhere it does nothing; the end-to-end tests then say what they lack and are skipped.
# KERNELFLEET_NO_PACKAGES=1 leaves the machine as it is.
#
# usage: packages.sh
set -eu
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && [ -z "${KERNELFLEET_NO_PACKAGES:-}" ] || exit 0
wanted=''
for pair in containerd:containerd runc:runc iptables:iptables ipset:ipset ip:iproute2 openssl:openssl \
    buildah:buildah mmdebstrap:mmdebstrap strip:binutils; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || wanted="$wanted ${pair##*:}"
done
[ -n "$wanted" ] || exit 0
echo "cluster: installing$wanted, which the end-to-end tests need" >&2
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $wanted >/dev/null; } ||
    echo "cluster: these packages could not be installed; the end-to-end tests are skipped" >&2
