//! The command line: subcommands and nothing else.

use std::process::ExitCode;

use kernelfleet::judge::runner;

fn main() -> ExitCode {
    // Hidden subcommands, started by a judge with a socket on descriptor 3.
    let args: Vec<String> = std::env::args().skip(1).collect();
    let command = args.first().map_or("", String::as_str);
    let serve: fn(kernelfleet::judge::wire::Channel) -> ! = match command {
        runner::CPU_COMMAND => runner::cpu::serve,
        runner::CUDA_COMMAND => runner::cuda::serve,
        runner::cuda::selftest::COMMAND => return runner::cuda::selftest::main(args.get(1..).unwrap_or_default()),
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
