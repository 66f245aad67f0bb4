//! What the subcommands print.
//!
//! Knows the two streams. Whoever reads only the first lines (`| head`) closes a pipe that is still written to: that ends
//! nothing and is no failure, so nothing here panics or asks whether it was read. All of `local` prints by this.

use std::io::Write;

/// A text and an end of line on standard output: what was asked for.
pub fn out(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// The same on standard error: what is told beside it.
pub fn err(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
