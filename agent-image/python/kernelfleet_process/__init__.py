"""The candidate's own process (`docs/measuring.md`, "Process path"): existing work directories, run as they are.

Knows KernelBench's form and CUDA Agent's layout. Must not know the reference, expected outputs, seeds or times: all code
of a candidate runs here, so nothing that is said here is more than an observation.
"""
