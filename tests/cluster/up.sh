#!/usr/bin/env bash
# A whole Kubernetes on this machine: etcd, API server, controller manager and scheduler, and nodes that each live in a
# network and a mount namespace of their own with containerd, kubelet, kube-proxy and kube-router. Needs root and the
# programs that build.sh makes. Prints nothing on standard output; the kubeconfig is .kernelfleet/cluster/kubeconfig.
#
# usage: up.sh [NODES]     1 if nothing is said, at most 8
. "$(dirname "$0")/lib.sh"

count=${1:-1}
case $count in [1-8]) ;; *) stop "NODES is \`$count\`" "a number from 1 to 8" ;; esac
need_root
need containerd:containerd runc:runc iptables:iptables ipset:ipset openssl:openssl ip:iproute2 nsenter:util-linux
[ -w "$(tracked)" ] || stop "no cgroup hierarchy that can be written to" "in a container: start it privileged"
for program in kube kube-router bridge pause; do
    [ -x "$bin/$program" ] || stop "no $bin/$program" "make it with: tests/cluster/build.sh"
done

if [ -e "$state" ]; then
    if alive apiserver && "$bin/kubectl" --kubeconfig="$kubeconfig" get --raw /readyz >/dev/null 2>&1; then
        [ -z "${KERNELFLEET_CLUSTER_WEIGHT:-}" ] || weigh "$KERNELFLEET_CLUSTER_WEIGHT"
        say "already up, with $(nodes | wc -l) nodes: export KUBECONFIG=$kubeconfig"
        exit 0
    fi
    stop "remains of an earlier cluster in $state" "clean up with: make cluster-down"
fi
if ip link show "$bridge" >/dev/null 2>&1 || [ -e "$run" ]; then
    # Without a process it is what one left that was interrupted.
    [ -n "$(members $group)" ] || "$here/down.sh"
fi
if ip link show "$bridge" >/dev/null 2>&1 || [ -e "$run" ]; then
    stop "another checkout's cluster is up on this machine ($bridge or $run exists)" "make cluster-down in that checkout"
fi
if (exec 3<>/dev/tcp/127.0.0.1/6443) 2>/dev/null; then
    stop "something listens on port 6443, which the API server needs" "see who: ss -ltnp 'sport = :6443'"
fi

began=$(date +%s)
mkdir -p "$state"/{pki,log,etcd} "$run"
chmod 700 "$state"
pki=$state/pki

# --- keys and certificates -------------------------------------------------------------------------------------------
key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$pki/$1.key" 2>/dev/null; }
issue() { # name, subject, further names
    key "$1"
    openssl req -new -key "$pki/$1.key" -subj "$2" -out "$pki/$1.csr"
    openssl x509 -req -in "$pki/$1.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial -days 365 -out "$pki/$1.crt" \
        -extfile <(echo "subjectAltName=DNS:localhost,IP:127.0.0.1${3:+,$3}") 2>/dev/null
}
kubeconfig() { # name of its certificate, file
    cat >"$2" <<K
apiVersion: v1
kind: Config
clusters: [{name: kernelfleet, cluster: {server: "https://$host_ip:6443", certificate-authority-data: $(base64 -w0 "$pki/ca.crt")}}]
users: [{name: $1, user: {client-certificate-data: $(base64 -w0 "$pki/$1.crt"), client-key-data: $(base64 -w0 "$pki/$1.key")}}]
contexts: [{name: kernelfleet, context: {cluster: kernelfleet, user: $1}}]
current-context: kernelfleet
K
    chmod 600 "$2"
}
key ca
openssl req -x509 -new -key "$pki/ca.key" -subj /CN=kernelfleet-test-bed -days 365 -out "$pki/ca.crt"
key service-accounts
openssl pkey -in "$pki/service-accounts.key" -pubout -out "$pki/service-accounts.pub"
issue apiserver /CN=kube-apiserver "IP:$host_ip,IP:${services%.0/*}.1,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
issue admin /O=system:masters/CN=admin
issue controllers /CN=system:kube-controller-manager
issue scheduler /CN=system:kube-scheduler
issue proxy /CN=system:kube-proxy
kubeconfig admin "$kubeconfig"
for name in controllers scheduler proxy; do kubeconfig "$name" "$state/$name.kubeconfig"; done
kubectl() { "$bin/kubectl" --kubeconfig="$kubeconfig" "$@"; }

# --- control plane ---------------------------------------------------------------------------------------------------
# A bridge, since a node's address must not be loopback; the nodes hang on it.
ip link add "$bridge" type bridge
ip addr add "$host_ip/24" dev "$bridge"
ip link set "$bridge" up

# A cluster that lives for an hour needs no fsync.
start etcd "$bin/kube" etcd --data-dir="$state/etcd" --unsafe-no-fsync --log-level=error \
    --listen-client-urls=http://127.0.0.1:2379 --advertise-client-urls=http://127.0.0.1:2379 --listen-peer-urls=http://127.0.0.1:2380
# Who did what, without bodies: what the tests count writes by.
cat >"$state/audit.yaml" <<'K'
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
K
start apiserver "$bin/kube" kube-apiserver --etcd-servers=http://127.0.0.1:2379 --advertise-address="$host_ip" \
    --service-account-key-file="$pki/service-accounts.pub" --service-account-signing-key-file="$pki/service-accounts.key" \
    --service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=$services \
    --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" --client-ca-file="$pki/ca.crt" \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --enable-aggregator-routing=true \
    --kubelet-client-certificate="$pki/admin.crt" --kubelet-client-key="$pki/admin.key" --kubelet-preferred-address-types=InternalIP \
    --audit-policy-file="$state/audit.yaml" --audit-log-path="$state/log/audit.json" --audit-log-maxsize=1000
wait_for 60 apiserver "the API server to be ready" kubectl get --raw /readyz
# Requests a second that the controllers and the scheduler allow themselves; their own defaults if nothing is said.
rate=()
[ -z "${KERNELFLEET_CLUSTER_QPS:-}" ] || rate=("--kube-api-qps=$KERNELFLEET_CLUSTER_QPS" "--kube-api-burst=$((2 * KERNELFLEET_CLUSTER_QPS))")
start controllers "$bin/kube" kube-controller-manager --kubeconfig="$state/controllers.kubeconfig" --leader-elect=false \
    --service-account-private-key-file="$pki/service-accounts.key" --root-ca-file="$pki/ca.crt" --use-service-account-credentials \
    --node-monitor-grace-period=20s "${rate[@]}"
start scheduler "$bin/kube" kube-scheduler --kubeconfig="$state/scheduler.kubeconfig" --leader-elect=false "${rate[@]}"

# --- nodes -----------------------------------------------------------------------------------------------------------
# The image of the container that holds a pod's namespaces: one static program in an archive made by hand.
pause_image() {
    local work digest
    work=$(mktemp -d)
    cp "$bin/pause" "$work/pause"
    (
        cd "$work"
        tar --sort=name --owner=0 --group=0 -cf layer.tar pause
        digest=$(sha256sum layer.tar | cut -d' ' -f1)
        printf '{"architecture":"%s","os":"linux","config":{"Entrypoint":["/pause"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
            "$(dpkg --print-architecture 2>/dev/null || echo amd64)" "$digest" >config.json
        printf '[{"Config":"config.json","RepoTags":["localhost/pause:1"],"Layers":["layer.tar"]}]' >manifest.json
        tar -cf "$state/pause.tar" manifest.json config.json layer.tar
    )
    rm -rf "$work"
}
pause_image

node_up() {
    local n=$1 name=node$1 folder=$state/node$1 address namespace socket=$run/node$1/containerd.sock enter other
    address=$(node_ip "$n") namespace=$(node_ns "$n")
    mkdir -p "$folder"/{containerd,kubelet,log,cni} "$run/$name"

    ip netns add "$namespace"
    ip link add "kf-v$n" type veth peer name eth0 netns "$namespace"
    ip link set "kf-v$n" master "$bridge" up
    inside() { nsenter --net="/run/netns/$namespace" "$@"; }
    inside ip link set lo up
    inside ip addr add "$address/24" dev eth0
    inside ip link set eth0 up
    inside ip route add default via "$host_ip"
    inside sysctl -qw net.ipv4.ip_forward=1
    # Pods are reached from the machine and from other nodes by their addresses, as with any flat pod network. Nodes know each
    # other's way: by the machine it would ask for forwarding, which is the machine's own to allow.
    ip route add "$(node_pods "$n")" via "$address"
    for other in $(seq "$count"); do
        [ "$other" = "$n" ] || inside ip route add "$(node_pods "$other")" via "$(node_ip "$other")"
    done

    cat >"$folder/cni/10-bridge.conflist" <<K
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "$run/$name/cni", "ranges": [[{"subnet": "$(node_pods "$n")"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
K
    cat >"$folder/containerd.toml" <<K
version = 2
root = "$folder/containerd"
state = "$run/$name/containerd"
[grpc]
  address = "$socket"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  # Without CAP_SYS_RESOURCE the pause container's score can't be lowered and no pod starts.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$bin"
    conf_dir = "$folder/cni"
K
    # What the kubelet puts at fixed places (device plugins, logs of containers) lands in the node's own folder.
    mkdir -p /var/lib/kubelet
    start "$name/containerd" nsenter --net="/run/netns/$namespace" unshare --mount --propagation slave bash -c '
        mount --make-rshared / && mount --bind "$1/kubelet" /var/lib/kubelet && mount --bind "$1/log" /var/log &&
        exec containerd --config "$1/containerd.toml" --log-level warn' containerd "$folder"
    wait_for 30 "$name/containerd" "containerd of $name to answer" ctr -a "$socket" version
    ctr -a "$socket" -n k8s.io images import "$state/pause.tar" >/dev/null

    issue "$name" "/O=system:nodes/CN=system:node:$name" "IP:$address,DNS:$name"
    kubeconfig "$name" "$folder/kubeconfig"
    cat >"$folder/kubelet.yaml" <<K
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://$socket
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $pki/$name.crt
tlsPrivateKeyFile: $pki/$name.key
cgroupDriver: cgroupfs
cgroupRoot: /$group/$name
enforceNodeAllocatable: []
failSwapOn: false
resolvConf: /dev/null
volumePluginDir: $folder/volume-plugins
evictionHard: {memory.available: 100Mi, nodefs.available: 1Gi, imagefs.available: 1Gi}
imageGCHighThresholdPercent: 100
nodeStatusUpdateFrequency: 5s
# Tests change Secrets that pods have mounted: a minute is what a kubelet takes to show them otherwise.
syncFrequency: 5s
# Tests kill containers often: nobody is to wait minutes for the next start.
featureGates: {KubeletCrashLoopBackOffMax: true}
crashLoopBackOff: {maxContainerRestartPeriod: 2s}
K
    for hierarchy in $(hierarchies); do
        mkdir -p "$hierarchy/$group/$name"
        controllers "$hierarchy" && controllers "$hierarchy/$group"
    done
    enter=(nsenter --target "$(cat "$state/$name/containerd.pid")" --mount --net)
    start "$name/kubelet" "${enter[@]}" "$bin/kube" kubelet --config="$folder/kubelet.yaml" --kubeconfig="$folder/kubeconfig" \
        --hostname-override="$name" --node-ip="$address"
    proxy_up "$n"
}
proxy_up() {
    local name=node$1
    start "$name/proxy" nsenter --target "$(cat "$state/$name/containerd.pid")" --mount --net "$bin/kube" kube-proxy \
        --kubeconfig="$state/proxy.kubeconfig" --hostname-override="$name" --proxy-mode=iptables --cluster-cidr=$pods \
        --conntrack-max-per-core=0
}
for n in $(seq "$count"); do node_up "$n"; done
[ -z "${KERNELFLEET_CLUSTER_WEIGHT:-}" ] || weigh "$KERNELFLEET_CLUSTER_WEIGHT"

ready() { [ "$(kubectl get node "node$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')" = True ]; }
proxied() { nsenter --net="/run/netns/$(node_ns "$1")" iptables-save -t nat 2>/dev/null | grep -q 'KUBE-SVC-'; }
for n in $(seq "$count"); do
    wait_for 60 "node$n/kubelet" "node$n to be Ready" ready "$n"
    # A first sync that met the kubelet's or the router's own is not always repeated, and Services would have no addresses: the
    # router waits for it, and a proxy without rules is started again.
    for _ in $(seq 50); do proxied "$n" && break; sleep .2; done
    proxied "$n" || {
        kill "$(cat "$state/node$n/proxy.pid")"
        proxy_up "$n"
        wait_for 30 "node$n/proxy" "kube-proxy of node$n to route Services" proxied "$n"
    }
    # NetworkPolicy, really enforced. It reads the node's address from the API server, so it comes after the kubelet.
    start "node$n/router" nsenter --target "$(cat "$state/node$n/containerd.pid")" --mount --net "$bin/kube-router" \
        --run-firewall=true --run-router=false --run-service-proxy=false --run-loadbalancer=false --enable-cni=false \
        --kubeconfig="$kubeconfig" --hostname-override="node$n" --service-cluster-ip-range=$services --health-port=0 --metrics-port=0
done
# A namespace without it refuses pods.
wait_for 30 controllers "the default service account" kubectl get serviceaccount default
say "up in $(($(date +%s) - began)) s, $count node(s): export KUBECONFIG=$kubeconfig"
