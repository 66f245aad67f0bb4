//! The CUDA driver as a runner uses it: errors as faults, one context, streams' events, modules.
//!
//! Knows driver calls and their order; must not know plans. Everything here runs on the one thread that has
//! made the context current.

use std::ffi::{CStr, CString, c_void};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use serde::{Deserialize, Serialize};

use super::super::Fault;

/// Oldest driver: `cuEventElapsedTime_v2` came with 12.8.
const MINIMUM_DRIVER: i32 = 12_080;

/// Turns a driver's result into a fault whose code says what kind it is.
///
/// # Errors
/// Unless `result` is success.
pub fn check(result: CUresult, doing: &str) -> Result<(), Fault> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let code = match result {
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE => "illegal_access",
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "memory",
        CUresult::CUDA_ERROR_INVALID_IMAGE
        | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
        | CUresult::CUDA_ERROR_INVALID_PTX
        | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        | CUresult::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND => "image",
        CUresult::CUDA_ERROR_NOT_FOUND => "symbol",
        CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE => "launch_failed",
        _ => "cuda",
    };
    Err(Fault::new(code, format!("{doing}: {}", describe(result))))
}

fn describe(result: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut pointer = std::ptr::null();
        // SAFETY: `pointer` is valid for a write; the driver answers with a static C string, or null.
        unsafe {
            get(result, &raw mut pointer);
            if pointer.is_null() { None } else { Some(CStr::from_ptr(pointer).to_string_lossy().into_owned()) }
        }
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(what)) => format!("{name} ({what})"),
        _ => format!("{result:?}"),
    }
}

/// What a card is; the names of PyTorch's device properties where it has them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    pub name: String,
    /// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`
    pub uuid: String,
    pub major: i32,
    pub minor: i32,
    pub multi_processor_count: i32,
    pub l2_cache_size: i64,
    pub total_memory: u64,
    /// Not in use by anyone when the question was asked.
    pub free_memory: u64,
    /// Of the driver: `13.0`.
    pub driver_version: String,
    pub clock_khz: i32,
    pub memory_clock_khz: i32,
    pub memory_bus_bits: i32,
    pub warp_size: i32,
    pub max_threads_per_block: i32,
    pub max_threads_per_multi_processor: i32,
    pub regs_per_multiprocessor: i32,
    pub shared_memory_per_block: i32,
    pub shared_memory_per_block_optin: i32,
    pub shared_memory_per_multiprocessor: i32,
    pub cooperative_launch: bool,
    /// Kernels can reach memory of the host's processes that nobody gave to the card (HMM, or shared page tables).
    pub pageable_memory_access: bool,
}

/// The primary context of device 0, current on this thread, with its stream and two events.
pub struct Context {
    pub device: sys::CUdevice,
    pub stream: sys::CUstream,
    start: sys::CUevent,
    end: sys::CUevent,
    pub info: DeviceInfo,
}

impl Context {
    /// Makes the context. Takes 0.1 to 0.8 s.
    ///
    /// # Errors
    /// `no_device` where there is no driver or card; `cuda` where the driver is too old or refuses.
    pub fn new() -> Result<Self, Fault> {
        // SAFETY: asks the loader for libcuda; running its constructors is what any CUDA program does.
        if !unsafe { sys::is_culib_present() } {
            return Err(Fault::new("no_device", "there is no CUDA driver here (libcuda.so.1)"));
        }
        // SAFETY: the first call of the driver; it takes no pointer.
        let result = unsafe { sys::cuInit(0) };
        if result == CUresult::CUDA_ERROR_NO_DEVICE {
            return Err(Fault::new("no_device", "the CUDA driver sees no card"));
        }
        check(result, "starting the CUDA driver")?;
        let mut version = 0;
        // SAFETY: `version` is valid for a write.
        check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, "asking for the driver's version")?;
        if version < MINIMUM_DRIVER {
            return Err(Fault::new("cuda", format!("driver {} is too old, 12.8 is needed", dotted(version))));
        }
        let mut device = 0;
        // SAFETY: `device` is valid for a write.
        check(unsafe { sys::cuDeviceGet(&raw mut device, 0) }, "opening device 0")?;
        let spin = sys::CUctx_flags_enum::CU_CTX_SCHED_SPIN as u32;
        // The primary context is this process's own, and the one that cuBLAS and cuDNN find.
        // SAFETY: `device` comes from cuDeviceGet.
        check(unsafe { sys::cuDevicePrimaryCtxSetFlags_v2(device, spin) }, "setting the context's flags")?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is valid for a write.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) }, "making a context")?;
        // SAFETY: `context` was just retained.
        check(unsafe { sys::cuCtxSetCurrent(context) }, "making the context current")?;
        for limit in [sys::CUlimit::CU_LIMIT_PRINTF_FIFO_SIZE, sys::CUlimit::CU_LIMIT_MALLOC_HEAP_SIZE] {
            // Admitted code has neither printf nor malloc; a driver that refuses so small a value is no error.
            // SAFETY: takes values only.
            let _ = unsafe { sys::cuCtxSetLimit(limit, 4096) };
        }
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` is valid for a write.
        check(unsafe { sys::cuStreamCreate(&raw mut stream, flags) }, "making a stream")?;
        let event = || {
            let mut event = std::ptr::null_mut();
            let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
            // SAFETY: `event` is valid for a write.
            check(unsafe { sys::cuEventCreate(&raw mut event, flags) }, "making an event").map(|()| event)
        };
        let (start, end) = (event()?, event()?);
        let info = device_info(device, version)?;
        Ok(Self { device, stream, start, end, info })
    }

    /// The card as it is now: free memory changes.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn info(&self) -> Result<DeviceInfo, Fault> {
        let (free, _) = memory()?;
        Ok(DeviceInfo { free_memory: free, ..self.info.clone() })
    }

    /// Waits for everything on the stream.
    ///
    /// # Errors
    /// Whatever a kernel before it did wrong.
    pub fn wait(&self, doing: &str) -> Result<(), Fault> {
        // SAFETY: the stream lives as long as the context.
        check(unsafe { sys::cuStreamSynchronize(self.stream) }, doing)
    }

    /// Time between two events around `work` on the stream, in microseconds; waits for its end.
    ///
    /// # Errors
    /// What `work` says, or what the device did wrong.
    pub fn timed(&self, work: impl FnOnce() -> Result<(), Fault>) -> Result<f64, Fault> {
        // SAFETY: events and stream live as long as the context.
        check(unsafe { sys::cuEventRecord(self.start, self.stream) }, "recording an event")?;
        work()?;
        // SAFETY: as above.
        check(unsafe { sys::cuEventRecord(self.end, self.stream) }, "recording an event")?;
        self.wait("running the plan")?;
        let mut milliseconds = 0f32;
        // SAFETY: both events were recorded and have happened; `milliseconds` is valid for a write.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, self.start, self.end) };
        check(result, "reading the device's clock")?;
        Ok(f64::from(milliseconds) * 1000.0)
    }

    /// Sets `bytes` from `address` to `value`, on the stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn set_bytes(&self, address: u64, value: u8, bytes: u64) -> Result<(), Fault> {
        // SAFETY: device memory; an address out of bounds is the driver's or the device's error.
        check(unsafe { sys::cuMemsetD8Async(address, value, size(bytes)?, self.stream) }, "filling memory")
    }
}

/// A length as the driver wants it.
///
/// # Errors
/// Where pointers are shorter than 64 bits.
pub fn size(bytes: u64) -> Result<usize, Fault> {
    usize::try_from(bytes).map_err(|e| Fault::new("memory", e.to_string()))
}

fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Free and total memory of the card, in bytes.
///
/// # Errors
/// When the driver refuses.
pub fn memory() -> Result<(u64, u64), Fault> {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: both are valid for writes.
    check(unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }, "asking for free memory")?;
    Ok((free as u64, total as u64))
}

fn device_info(device: sys::CUdevice, version: i32) -> Result<DeviceInfo, Fault> {
    let get = |attribute: Attribute| {
        let mut value = 0;
        // SAFETY: `value` is valid for a write. An attribute that a driver doesn't know reads as 0.
        let _ = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
        value
    };
    let mut pageable = 0;
    let asked = Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS;
    // SAFETY: `pageable` is valid for a write.
    let known = unsafe { sys::cuDeviceGetAttribute(&raw mut pageable, asked, device) };
    check(known, "asking whether kernels reach the host's memory")?;
    let mut name = [0 as std::ffi::c_char; 256];
    // SAFETY: `name` holds the 255 bytes announced and one more, which stays zero.
    check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, device) }, "asking for the card's name")?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` is valid for a write.
    check(unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }, "asking for the card's UUID")?;
    let hex: String = uuid.bytes.iter().map(|b| format!("{:02x}", b.cast_unsigned())).collect();
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    let (free_memory, total_memory) = memory()?;
    Ok(DeviceInfo {
        // SAFETY: the array ends with a zero byte.
        name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
        uuid: format!("GPU-{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)),
        major: get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        minor: get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        multi_processor_count: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        l2_cache_size: i64::from(get(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)),
        total_memory,
        free_memory,
        driver_version: dotted(version),
        clock_khz: get(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        memory_clock_khz: get(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
        memory_bus_bits: get(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
        warp_size: get(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE),
        max_threads_per_block: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        max_threads_per_multi_processor: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
        regs_per_multiprocessor: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR),
        shared_memory_per_block: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
        shared_memory_per_block_optin: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        shared_memory_per_multiprocessor: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        cooperative_launch: get(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH) != 0,
        pageable_memory_access: pageable != 0,
    })
}

/// A loaded image. Dropping it unloads it: nothing of it may still run or be captured.
#[derive(Debug)]
pub struct Module {
    handle: sys::CUmodule,
}

impl Module {
    /// Loads a cubin, or PTX that ends with a zero byte. The image is copied to aligned memory first.
    ///
    /// # Errors
    /// `image` where the driver doesn't take it.
    pub fn load(image: &[u8], doing: &str) -> Result<Self, Fault> {
        // An ELF image must be aligned to 8 bytes; the last word is zero, so that PTX text ends.
        let mut words = vec![0u64; image.len() / 8 + 1];
        // SAFETY: `words` has at least as many bytes as `image`; they don't overlap.
        unsafe { std::ptr::copy_nonoverlapping(image.as_ptr(), words.as_mut_ptr().cast::<u8>(), image.len()) };
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is valid for a write, the image for reads as far as its own headers say: the
        // supervisor has admitted those. No options are passed.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut handle,
                words.as_ptr().cast::<c_void>(),
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        check(result, doing)?;
        Ok(Self { handle })
    }

    /// The kernel of that name.
    ///
    /// # Errors
    /// `symbol` where the image has none.
    pub fn function(&self, name: &str) -> Result<sys::CUfunction, Fault> {
        let text = CString::new(name).map_err(|_| Fault::new("symbol", "a kernel's name has a zero byte"))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, `text` a C string, `function` valid for a write.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut function, self.handle, text.as_ptr()) };
        check(result, &format!("looking for kernel `{name}` (is it declared `extern \"C\" __global__`?)"))?;
        Ok(function)
    }
}

/// What the driver makes of PTX for this card: an image that loads without being compiled again.
///
/// # Errors
/// `image` where the driver doesn't take it.
pub fn assemble(ptx: &[u8]) -> Result<Vec<u8>, Fault> {
    const DOING: &str = "compiling for this card";
    let mut state = std::ptr::null_mut();
    // SAFETY: `state` is valid for a write; no options are passed.
    let created = unsafe { sys::cuLinkCreate_v2(0, std::ptr::null_mut(), std::ptr::null_mut(), &raw mut state) };
    check(created, DOING)?;
    // The text has to end with a zero byte, which counts.
    let mut text = [ptx, &[0]].concat();
    let mut link = || {
        // SAFETY: `state` was just created, `text` has as many bytes as are said, the name is a C string.
        let added = unsafe {
            sys::cuLinkAddData_v2(
                state,
                sys::CUjitInputType::CU_JIT_INPUT_PTX,
                text.as_mut_ptr().cast(),
                text.len(),
                c"kernelfleet".as_ptr(),
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        check(added, DOING)?;
        let (mut image, mut bytes) = (std::ptr::null_mut(), 0usize);
        // SAFETY: both are valid for writes.
        check(unsafe { sys::cuLinkComplete(state, &raw mut image, &raw mut bytes) }, DOING)?;
        // SAFETY: the driver says that so many bytes lie there, and keeps them until the state is destroyed.
        Ok(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), bytes) }.to_vec())
    };
    let done = link();
    // SAFETY: created above, destroyed once; `done` holds a copy.
    let _ = unsafe { sys::cuLinkDestroy(state) };
    done
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, unloaded once. An error (a dead context) leaves nothing to be done.
        let _ = unsafe { sys::cuModuleUnload(self.handle) };
    }
}

/// An attribute of a kernel.
///
/// # Errors
/// When the driver refuses.
pub fn attribute(function: sys::CUfunction, which: sys::CUfunction_attribute) -> Result<u64, Fault> {
    let mut value = 0;
    // SAFETY: `value` is valid for a write, `function` belongs to a loaded module.
    check(unsafe { sys::cuFuncGetAttribute(&raw mut value, which, function) }, "asking for a kernel's attributes")?;
    Ok(u64::try_from(value).unwrap_or(0))
}

/// Offset and size of each parameter of a kernel, in bytes.
///
/// # Errors
/// When the driver refuses.
pub fn parameters(function: sys::CUfunction) -> Result<Vec<(usize, usize)>, Fault> {
    let mut table = Vec::new();
    loop {
        let (mut offset, mut size) = (0usize, 0usize);
        // SAFETY: both are valid for writes. Past the last parameter the answer is INVALID_VALUE.
        let result = unsafe { sys::cuFuncGetParamInfo(function, table.len(), &raw mut offset, &raw mut size) };
        if result == CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(table);
        }
        check(result, "asking for a kernel's parameters")?;
        table.push((offset, size));
        if table.len() > 4096 {
            return Err(Fault::new("arguments", "the kernel has more than 4096 parameters"));
        }
    }
}

/// An instantiated graph.
pub struct Graph {
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Captures what `work` puts on the stream and makes it ready to launch.
    ///
    /// # Errors
    /// What `work` says, or the driver's.
    pub fn capture(context: &Context, work: impl FnOnce() -> Result<(), Fault>) -> Result<Self, Fault> {
        // Relaxed: libraries may load a kernel lazily while they are captured; no other thread uses the device.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as the context and isn't captured already.
        check(unsafe { sys::cuStreamBeginCapture_v2(context.stream, mode) }, "beginning to capture")?;
        let worked = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: `graph` is valid for a write; the capture began above and must be ended in any case.
        let ended = unsafe { sys::cuStreamEndCapture(context.stream, &raw mut graph) };
        let result = worked.and_then(|()| check(ended, "capturing the plan")).and_then(|()| {
            let mut exec = std::ptr::null_mut();
            // SAFETY: `exec` is valid for a write, `graph` was just made.
            check(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) }, "instantiating the graph")?;
            Ok(Self { exec })
        });
        if !graph.is_null() {
            // SAFETY: the template isn't needed by the instantiated graph.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        let graph = result?;
        // SAFETY: both live; moves the graph's data to the device ahead of the first launch, which does it
        // where this fails.
        let _ = unsafe { sys::cuGraphUpload(graph.exec, context.stream) };
        context.wait("uploading the graph")?;
        Ok(graph)
    }

    /// Puts one run on the stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self, context: &Context) -> Result<(), Fault> {
        // SAFETY: both live.
        check(unsafe { sys::cuGraphLaunch(self.exec, context.stream) }, "launching the plan")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}
