//! The command line: subcommands and nothing else.

use std::process::ExitCode;

use kernelfleet::judge::runner;

fn main() -> ExitCode {
    // Hidden subcommands, started by a judge with a socket on descriptor 3.
    let command = std::env::args().nth(1).unwrap_or_default();
    let serve: fn(kernelfleet::judge::wire::Channel) -> ! = match command.as_str() {
        runner::CPU_COMMAND => runner::cpu::serve,
        _ => return ExitCode::SUCCESS,
    };
    match runner::inherited_channel() {
        Ok(channel) => serve(channel),
        Err(error) => {
            eprintln!("kernelfleet {command}: {error}");
            ExitCode::FAILURE
        }
    }
}
