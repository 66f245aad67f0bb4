//! placeholder
use super::Plan;
/// Caps.
#[derive(Clone, Debug)]
pub struct Limits {
    pub nodes: usize,
}
/// What is wrong with a plan.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    pub node: Option<usize>,
    pub message: String,
}
/// Checks a plan.
/// # Errors
/// The first problem.
pub fn validate(_plan: &Plan, _limits: &Limits) -> Result<(), Problem> {
    Ok(())
}
impl Default for Limits {
    fn default() -> Self {
        Self { nodes: 20_000 }
    }
}
