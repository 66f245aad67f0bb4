//! Tells which system calls a filter refuses, so that one that a program turns out to need can be found.
//!
//! Knows the signal that a trapping filter sends and how a refused call looks in it. Must not know who runs under the
//! filter. A thread that blocks SIGSYS is ended by it instead: that, too, says that the filter was the reason.

use std::sync::atomic::{AtomicU64, Ordering};

/// Different calls that are kept; a program that runs at all meets few.
const KEPT: usize = 32;

/// Number and first argument of each, one added to the number so that 0 means none.
static SEEN: [AtomicU64; KEPT] = [const { AtomicU64::new(0) }; KEPT];

extern "C" fn note(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: with SA_SIGINFO the kernel hands over the context of the thread that called; it may be changed, and what is
    // changed is what the thread finds when it goes on: the call's result.
    let (number, argument) = unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            let registers = &mut (*context).uc_mcontext.gregs;
            let found = (registers[libc::REG_RAX as usize], registers[libc::REG_RDI as usize]);
            registers[libc::REG_RAX as usize] = -i64::from(libc::EPERM);
            (found.0.cast_unsigned(), found.1.cast_unsigned())
        }
        #[cfg(target_arch = "aarch64")]
        {
            let registers = &mut (*context).uc_mcontext.regs;
            let found = (registers[8], registers[0]);
            registers[0] = (-i64::from(libc::EPERM)).cast_unsigned();
            found
        }
    };
    let word = ((number + 1) << 32) | (argument & 0xffff_ffff);
    for place in &SEEN {
        match place.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(present) if present == word => return,
            Err(_) => {}
        }
    }
}

/// From now on a call that a trapping filter refuses fails with EPERM and is kept for `calls`.
///
/// # Errors
/// When the kernel takes no handler.
pub fn watch() -> std::io::Result<()> {
    // SAFETY: an all-zero sigaction is a valid value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESTART;
    // SAFETY: the handler touches atomics and the context it is given, nothing else.
    if unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Number and first argument of every call that was refused so far, each once.
#[must_use]
pub fn calls() -> Vec<(u32, u32)> {
    SEEN.iter()
        .map(|place| place.load(Ordering::Relaxed))
        .take_while(|word| *word != 0)
        .map(|word| (u32::try_from((word >> 32) - 1).unwrap_or(0), (word & 0xffff_ffff) as u32))
        .collect()
}
