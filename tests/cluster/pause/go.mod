module kernelfleet.dev/tests/cluster/pause

go 1.26
