//! The roles that pods run (`docs/pods.md`): the modules of a local run, with a broker between agents and judges.
//!
//! Knows how these are put together in pods. Must not know how they are made: that is the operator's.

pub mod agent;
pub mod arguments;
pub mod bench;
pub mod broker_client;
pub mod card;
pub mod gateway;
pub mod health;
pub mod init;
pub mod judge;
pub mod leases;
pub mod seal;
pub mod tail;

use crate::local::commands::{self, Failure};

/// The agent of a pod; returns the exit status. SIGTERM ends it at once: the pod is replaced, and what it did is void.
#[must_use]
pub fn run_agent(arguments: arguments::Agent) -> u8 {
    extern "C" fn end(_: i32) {
        // SAFETY: `_exit` may be called in a signal handler.
        unsafe { libc::_exit(143) }
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler calls `_exit` alone, which is safe in a signal handler.
        unsafe { libc::signal(signal, end as *const () as libc::sighandler_t) };
    }
    let end = agent::main(&arguments.get());
    if let agent::End::Misused(why) | agent::End::Fault(why) = &end {
        eprintln!("kernelfleet agent: {why}");
    }
    end.status()
}

/// The judge of a pod, until SIGTERM.
///
/// # Errors
/// When the device or the toolchain is missing, or the settings are wrong.
pub fn run_judge(arguments: arguments::JudgeWorker) -> Result<(), Failure> {
    init::stand_above();
    let device = commands::pick(arguments.device());
    let environment = commands::ready(device)?;
    let stop = commands::interrupts();
    judge::main(arguments.get(device), environment, stop).map_err(|e| Failure::Fault(e.to_string()))
}

/// Lays the tools out.
///
/// # Errors
/// When the disk refuses.
pub fn run_seal(arguments: &arguments::Seal) -> Result<(), Failure> {
    seal::seal(&arguments.to).map_err(|e| Failure::Fault(e.to_string()))
}

/// Keeps a sandbox for the agent of its pod, until SIGTERM.
///
/// # Errors
/// When its socket can't be made.
pub fn run_sandbox(arguments: arguments::Sandbox) -> Result<(), Failure> {
    let fault = |e: std::io::Error| Failure::Fault(e.to_string());
    let (socket, options) = arguments.get().map_err(fault)?;
    crate::sandbox::keeper::wait(&socket, &options).map_err(fault)
}

/// What requests under way may take after SIGTERM.
const GATEWAY_GRACE: std::time::Duration = std::time::Duration::from_secs(25);

/// One model endpoint for the agents of a namespace, until SIGTERM.
///
/// # Errors
/// When a setting is wrong or the address can't be used.
pub fn run_gateway(arguments: arguments::Gateway) -> Result<(), Failure> {
    let arguments = arguments.get().map_err(Failure::Request)?;
    gateway::main(arguments, commands::interrupts(), GATEWAY_GRACE).map_err(|e| match e {
        gateway::Failure::Settings(why) => Failure::Request(why),
        gateway::Failure::Serve(why) => Failure::Fault(why.to_string()),
    })
}
