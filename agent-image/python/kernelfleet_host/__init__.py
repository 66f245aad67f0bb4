"""The reference host: runs a task's own `Model`, and is where inputs, expected outputs and comparisons live.

Knows the section "Reference host" of `docs/interfaces.md` and the rules of `docs/measuring.md`. Must not know about
candidates beyond the buffers that their outputs lie in, nor decide a verdict: the supervisor does.
"""
