#!/usr/bin/env bash
# Installs the chart of this checkout into the cluster that is up, or upgrades it.
#
# usage: install.sh [FLAGS OF helm ..]
. "$(dirname "$0")/lib.sh"

[ -f "$kubeconfig" ] || stop "no cluster is up" "start one with: make cluster"
chart=$root/charts/kernelfleet
export KUBECONFIG=$kubeconfig
if [ ! -f "$chart/Chart.yaml" ]; then
    "$bin/kubectl" apply --server-side --force-conflicts -f "$root/crds" >/dev/null
    say "this checkout has no chart; the definitions of the custom resources are in"
    exit 0
fi
"$bin/helm" upgrade --install kernelfleet "$chart" --namespace kernelfleet-system --create-namespace \
    --values "$here/values.yaml" --wait --timeout 3m "$@" >/dev/null || {
    "$bin/kubectl" -n kernelfleet-system get pods,events >&2
    stop "the chart did not come up (what is there is shown above)"
}
say "chart installed in the namespace kernelfleet-system"
