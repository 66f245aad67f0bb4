//! `kernelfleet gpu-facts`: what the card is, as one JSON object, for whoever must not make a context itself.
//!
//! Knows the driver and, for the power limit, NVML where it is there. It must not know what is judged.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::process::ExitCode;

use serde_json::{Value, json};

use super::super::Fault;
use super::driver::Context;

/// Name of the hidden subcommand.
pub const COMMAND: &str = "gpu-facts";

/// Prints the facts, or says on the standard error why there are none.
pub fn main() -> ExitCode {
    match facts() {
        Ok(facts) => {
            println!("{facts}");
            ExitCode::SUCCESS
        }
        Err(fault) => {
            eprintln!("{}", fault.message);
            ExitCode::FAILURE
        }
    }
}

/// The fields of `DeviceInfo`, and `cc_major`, `cc_minor`, `driver`, `memory_bytes`, `memory_free_bytes`,
/// `power_limit_w` (null where NVML doesn't tell).
///
/// # Errors
/// `no_device` and the driver's.
pub fn facts() -> Result<Value, Fault> {
    let info = Context::new()?.info()?;
    let mut facts = serde_json::to_value(&info).map_err(|e| Fault::new("internal", e.to_string()))?;
    facts["cc_major"] = json!(info.major);
    facts["cc_minor"] = json!(info.minor);
    facts["driver"] = json!(info.driver_version);
    facts["memory_bytes"] = json!(info.total_memory);
    facts["memory_free_bytes"] = json!(info.free_memory);
    facts["power_limit_w"] = json!(power_limit(&info.uuid));
    Ok(facts)
}

/// Watts that the card may draw, by NVML.
fn power_limit(uuid: &str) -> Option<u32> {
    type Handle = *mut c_void;
    // SAFETY: the name is a C string; the library is the driver's own.
    let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return None;
    }
    let find = |name: &std::ffi::CStr| {
        // SAFETY: the handle is open, the name a C string.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    };
    let uuid = CString::new(uuid).ok()?;
    let (init, by_uuid, limit) =
        (find(c"nvmlInit_v2")?, find(c"nvmlDeviceGetHandleByUUID")?, find(c"nvmlDeviceGetPowerManagementLimit")?);
    let mut device: Handle = std::ptr::null_mut();
    let mut milliwatts: c_uint = 0;
    // SAFETY: the three functions have these signatures in every version of NVML (nvml.h); all pointers are
    // valid for the time of the calls. Status 0 is success.
    unsafe {
        let init = std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(init);
        let by_uuid =
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int>(by_uuid);
        let limit = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Handle, *mut c_uint) -> c_int>(limit);
        if init() != 0 || by_uuid(uuid.as_ptr(), &raw mut device) != 0 || limit(device, &raw mut milliwatts) != 0 {
            return None;
        }
    }
    Some(milliwatts / 1000)
}
