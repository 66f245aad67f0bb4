//! The services between the parts: code of `proto/`, and nothing else. Knows nobody.

#![allow(clippy::pedantic, clippy::all, clippy::unwrap_used, clippy::expect_used, missing_debug_implementations)]

pub mod v1 {
    tonic::include_proto!("kernelfleet.v1");
}
