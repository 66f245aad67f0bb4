#!/usr/bin/env bash
# Builds the programs of the test bed from the Go modules beside this file into .kernelfleet/cluster/bin. What is there
# already, from the same sources, is left alone. Cold it takes minutes, most of them for `kube` and `prometheus`; warm seconds.
#
# usage: build.sh [kube|cni|router|pause|helm|prometheus|kwok|kueue|s3|card ..]     the first five if nothing is said
. "$(dirname "$0")/lib.sh"

# The version that go.mod asks for: stamped into the program, or the API server would call itself v0.0.0.
kubernetes=$(awk '$1 == "k8s.io/kubernetes" { print $2; exit }' "$here/kube/go.mod")
version() {
    local package=k8s.io/component-base/version minor=${kubernetes#v1.}
    echo "-X $package.gitVersion=$kubernetes -X $package.gitMajor=1 -X $package.gitMinor=${minor%%.*}" \
        "-X $package.gitTreeState=clean -X $package.gitCommit=0000000000000000000000000000000000000000" \
        "-X $package.buildDate=1970-01-01T00:00:00Z"
}

# build MODULE FLAGS.. -- PACKAGES..: skipped where the stamp says that these sources were built with these words.
build() {
    local module=$1 stamp wanted began
    shift
    stamp=$bin/.$module.stamp
    wanted=$({ echo "$@"; cat "$here/$module"/*; } | sha256sum)
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return 0
    command -v go >/dev/null 2>&1 || stop "no go, which builds Kubernetes and its neighbours" \
        "$(sed -n 's/^go /Go &/p' "$here/kube/go.mod" | sed 's/Go go/Go/') or later: https://go.dev/doc/install"
    began=$(date +%s)
    say "building $module"
    rm -f "$stamp"
    # -mod=readonly: go.mod and go.sum are the pins, a build doesn't change them.
    (cd "$here/$module" && CGO_ENABLED=0 GOFLAGS=-mod=readonly go build -trimpath -buildvcs=false -o "$bin/" "$@") ||
        stop "$module did not build (the compiler's words are above)" "no network or a proxy: set GOPROXY or HTTPS_PROXY and start again"
    echo "$wanted" >"$stamp"
    say "built $module in $(($(date +%s) - began)) s"
}

[ $# -gt 0 ] || set -- pause cni router kube helm
# Two calls at once wait for each other.
exec 8>"$home/build.lock"
command -v flock >/dev/null 2>&1 && flock 8
for part in "$@"; do
    case $part in
        kube)
            build kube -ldflags "-s -w $(version)" .
            ln -sf kube "$bin/kubectl"
            ;;
        pause) build pause -ldflags '-s -w' . ;;
        cni)
            plugins=github.com/containernetworking/plugins/plugins
            build cni -ldflags '-s -w' $plugins/main/bridge $plugins/main/loopback $plugins/ipam/host-local
            ;;
        router) build router -ldflags '-s -w' github.com/cloudnativelabs/kube-router/v2/cmd/kube-router ;;
        helm) build helm -ldflags '-s -w' helm.sh/helm/v3/cmd/helm ;;
        # Of its ways to find targets only Kubernetes is built in: the others would double the build.
        prometheus) build prometheus -tags remove_all_sd,enable_kubernetes_sd -ldflags '-s -w' github.com/prometheus/prometheus/cmd/prometheus ;;
        kwok)
            build kwok -ldflags '-s -w' sigs.k8s.io/kwok/cmd/kwok
            ;;
        kueue)
            build kueue -ldflags '-s -w' sigs.k8s.io/kueue/cmd/kueue
            ;;
        # A server that speaks S3 over a folder, for the tests of the broker's objects.
        s3) build s3 -ldflags '-s -w' github.com/versity/versitygw/cmd/versitygw ;;
        # A device plugin, for a machine with a card.
        card) build card -ldflags '-s -w' . ;;
        *) stop "unknown part \`$part\`" "allowed: kube, cni, router, pause, helm, prometheus, kwok, kueue, s3, card" ;;
    esac
done
