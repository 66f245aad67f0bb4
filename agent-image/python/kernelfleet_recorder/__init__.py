"""The recorder: a candidate's `forward`, called once with inputs that have no data, becomes a launch plan.

Knows PyTorch, the plan format (`src/plan/mod.rs`) and the op `record` (`docs/interfaces.md`). Must not know the
reference, input values, a clock or a GPU. Everything here shares a process with the candidate: refusals are advice to
honest people, while what protects a verdict is that a plan can only say what a plan can say.
"""
