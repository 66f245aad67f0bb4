//! The built-in policy.
