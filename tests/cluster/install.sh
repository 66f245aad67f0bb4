#!/usr/bin/env bash
# Installs the chart of this checkout into the cluster that is up, or upgrades it, with what the test bed has instead of a
# registry and a provisioner of volumes: PyTorch for judges, and four folders of the node for ledgers.
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
packages=$(cd "$root/.kernelfleet/python/lib/python3.11/site-packages" 2>/dev/null && pwd -P) ||
    stop "no .kernelfleet/python with a Python 3.11, whose packages the judges mount" \
        "KERNELFLEET_BASE_PYTHON=python3.11 make env"

namespace=kernelfleet-system
# Judges aren't root's equals: what they need beyond `restricted` is in `baseline`.
"$bin/kubectl" apply -f - >/dev/null <<K
apiVersion: v1
kind: Namespace
metadata: {name: $namespace, labels: {pod-security.kubernetes.io/enforce: baseline}}
---
# Bound by the scheduler, which so knows at once that a pod can go.
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: test-bed}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: test-bed-packages}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
---
# A claim, since baseline forbids pods to name a folder of the node.
apiVersion: v1
kind: PersistentVolume
metadata: {name: pytorch}
spec:
  capacity: {storage: 8Gi}
  accessModes: [ReadOnlyMany]
  storageClassName: test-bed-packages
  persistentVolumeReclaimPolicy: Retain
  hostPath: {path: $packages, type: Directory}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: pytorch, namespace: $namespace}
spec: {accessModes: [ReadOnlyMany], storageClassName: test-bed-packages, resources: {requests: {storage: 1Gi}}}
K
for n in 1 2 3 4; do
    # A folder of the node gets no group from the pod, so it is open to all.
    mkdir -p "$state/ledgers/$n"
    chmod 777 "$state/ledgers/$n"
    "$bin/kubectl" apply -f - >/dev/null <<K
apiVersion: v1
kind: PersistentVolume
metadata: {name: ledger-$n}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: test-bed
  persistentVolumeReclaimPolicy: Retain
  hostPath: {path: $state/ledgers/$n, type: Directory}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [node1]}]}]}}
K
done
# The images keep their names, so what runs of an earlier program would go on with it.
"$bin/kubectl" -n $namespace delete pods --all --wait=false >/dev/null
# The definitions may be in already, applied by hand or by a test.
"$bin/helm" upgrade --install kernelfleet "$chart" --namespace $namespace --take-ownership \
    --values "$here/values.yaml" --wait --timeout 3m "$@" >/dev/null || {
    "$bin/kubectl" -n $namespace get pods,events >&2
    stop "the chart did not come up (what is there is shown above)"
}
say "chart installed in the namespace $namespace; to use it:
  export KUBECONFIG=$kubeconfig PATH=\$PATH:$bin
  kubectl apply -f $root/examples/cluster/test-bed.yaml    # a pool, ready after about a minute
  kubectl apply -f $root/examples/configmap.yaml           # a first job of its own tasks"
